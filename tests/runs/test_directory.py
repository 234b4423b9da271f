from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import BaseModel

from normattn.errors import InputError
from normattn.lab.runs import RunDirectory, RunStatus, read_status
from normattn.settings import first_difference


class Inner(BaseModel):
    lr: float = 0.1


class Config(BaseModel):
    steps: int = 5
    threads: int = 1
    inner: Inner = Inner()


def open_run(path: Path, config: Config | None = None) -> RunDirectory:
    return RunDirectory.open(path, config or Config(), "toy", changeable={"threads"})


def make_run(path: Path) -> RunDirectory:
    run = open_run(path)
    with run.lock():
        return run


def test_the_configuration_is_stored_whole_and_reopened(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    stored = json.loads((tmp_path / "run" / "config.json").read_text())
    assert stored == {
        "format": 1,
        "kind": "toy",
        "config": {"steps": 5, "threads": 1, "inner": {"lr": 0.1}},
    }
    assert open_run(tmp_path / "run").config == stored["config"]
    assert RunDirectory.existing(tmp_path / "run").kind == "toy"


def test_another_configuration_is_refused_by_its_fields(tmp_path: Path) -> None:
    make_run(tmp_path)
    before = (tmp_path / "config.json").read_bytes()
    with pytest.raises(InputError, match=r"inner\.lr is 0\.1 there and 0\.2 here") as caught:
        open_run(tmp_path, Config(inner=Inner(lr=0.2)))
    assert str(tmp_path) in str(caught.value)
    with pytest.raises(InputError, match=r"steps is 5 .* \(1 more differ: inner\.lr\)"):
        open_run(tmp_path, Config(steps=6, threads=9, inner=Inner(lr=0.2)))
    assert open_run(tmp_path, Config(threads=2)).config["threads"] == 1
    assert (tmp_path / "config.json").read_bytes() == before


@pytest.mark.parametrize("content", ['{"kind": "toy", "conf', "[1]", '{"kind": "toy"}', "\xff\x00"])
def test_a_damaged_configuration_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content, encoding="latin-1")
    with pytest.raises(InputError, match=r"config\.json is damaged"):
        open_run(tmp_path)


def test_a_place_that_holds_something_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    with pytest.raises(InputError, match="kind 'toy', expected 'other'"):
        RunDirectory.open(tmp_path / "run", Config(), "other")
    with pytest.raises(InputError, match="not a run directory"):
        RunDirectory.existing(tmp_path)
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.tex").write_text("mine")
    with pytest.raises(InputError, match="is a file"):
        open_run(mine / "thesis.tex")
    for make in (open_run, lambda path: RunDirectory(path, "toy", {})):
        with pytest.raises(InputError, match="holds other files"), make(mine).lock():
            pass
    # Who is refused takes no lock.
    assert [entry.name for entry in mine.iterdir()] == ["thesis.tex"]


def test_nothing_is_written_before_the_lock(tmp_path: Path) -> None:
    run = open_run(tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with run.lock():
        assert {path.name for path in (tmp_path / "run").iterdir()} == {".lock", "config.json"}


def test_another_configuration_that_came_between_open_and_lock_is_refused(tmp_path: Path) -> None:
    first, second = open_run(tmp_path), open_run(tmp_path, Config(steps=6))
    with first.lock():
        stored = (tmp_path / "config.json").read_bytes()
        with pytest.raises(InputError, match="steps is 5 there and 6 here"), second.lock():
            pass
    assert (tmp_path / "config.json").read_bytes() == stored


def test_status_goes_to_the_disk_and_back(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    assert run.status is None
    run.set_status("interrupted", 3, 5, "why")
    assert read_status(tmp_path) == RunStatus("interrupted", 3, 5, "why")
    run.set_status("diverged", 3, 5, "why", where="blocks.0", checkpoint="checkpoints/step-2")
    ended = RunStatus("diverged", 3, 5, "why", "blocks.0", "checkpoints/step-2")
    assert read_status(tmp_path) == ended


@pytest.mark.parametrize(
    "content",
    [
        "{",
        '{"state": "x", "step": 1, "steps": 2}',
        '{"state": "running", "step": "1", "steps": 2}',
        '{"state": "diverged", "step": 1, "steps": 2, "checkpoint": 3}',
        '{"state": "running", "step": 1, "steps": 2, "place": "here"}',
    ],
)
def test_a_damaged_status_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "status.json").write_text(content)
    with pytest.raises(InputError, match=r"status\.json is damaged"):
        read_status(tmp_path)


HOLDS = """
import signal, sys, time
from pathlib import Path
from normattn.locks import locked
from normattn.stopping import stop_with_parent

def save(*_):
    time.sleep({saves})
    sys.exit()

signal.signal(signal.SIGTERM, save)
if len(sys.argv) > 2:
    stop_with_parent(int(sys.argv[2]))
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""
STARTS = """
import os, subprocess, sys
subprocess.run([sys.executable, "-c", sys.argv[2], sys.argv[1], str(os.getpid())])
"""


@pytest.mark.parametrize("orphaned", [False, True])
def test_a_killed_command_is_waited_for(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], orphaned: bool
) -> None:
    run = open_run(tmp_path)
    holds = HOLDS.format(saves=1.5)
    program = (
        [STARTS, str(tmp_path / ".lock"), holds] if orphaned else [holds, str(run.path / ".lock")]
    )
    with subprocess.Popen([sys.executable, "-c", *program], stdout=subprocess.PIPE) as command:
        assert command.stdout is not None
        assert command.stdout.readline() == b"held\n"
        command.kill()  # And nobody waits for it before the next command comes.
        with run.lock():
            pass
    # The orphan saves its state first, and whoever waits for it says so.
    assert not orphaned or "waiting for process" in capfd.readouterr().err


def test_a_worker_whose_command_is_alive_is_not_waited_for(tmp_path: Path) -> None:
    run = open_run(tmp_path)
    program = [STARTS, str(tmp_path / ".lock"), HOLDS.format(saves=0.0)]
    with subprocess.Popen([sys.executable, "-c", *program], stdout=subprocess.PIPE) as command:
        assert command.stdout is not None
        assert command.stdout.readline() == b"held\n"
        holder = re.escape((tmp_path / ".lock").read_text().partition("\n")[0])
        with pytest.raises(InputError, match=f"in use by process {holder}"), run.lock():
            pass
        command.kill()
    with run.lock():
        pass


def test_the_lock_removes_what_a_killed_writer_left(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    (tmp_path / ".status.json.abc").write_text("{")
    (tmp_path / "checkpoints" / ".step-00000004.xyz").mkdir(parents=True)
    (tmp_path / ".mine").write_text("kept")
    with run.lock():
        names = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    assert names == {"config.json", ".lock", ".mine", "checkpoints"}


@pytest.mark.parametrize(
    ("stored", "wanted", "expected"),
    [
        ({"a": 1}, {"a": 1.0}, None),
        ({"a": True}, {"a": 1}, ("a", "True", "1")),
        ({"a": {"b": [1, 2]}}, {"a": {"b": [1, 3]}}, ("a.b", "[1, 2]", "[1, 3]")),
        ({"a": 1, "old": 2}, {"a": 1}, ("old", "2", "absent")),
        ({}, {"new": None}, ("new", "absent", "None")),
    ],
)
def test_first_difference(
    stored: object, wanted: object, expected: tuple[str, str, str] | None
) -> None:
    assert first_difference(stored, wanted) == expected
