"""The folder of a run: its configuration, status and lock; checkpoints; metrics; environment."""

from __future__ import annotations

import errno
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from normattn.errors import InputError
from normattn.lab.runs import (
    Checkpoint,
    Checkpoints,
    MetricsLog,
    RunDirectory,
    read_metrics,
    read_status,
)
from normattn.lab.runs.timing import Timing, interleave
from normattn.lab.training.config import LoopConfig
from normattn.settings import first_difference


def open_run(path: Path, **changes: Any) -> RunDirectory:
    return RunDirectory.open(path, LoopConfig(**changes), "toy", changeable={"threads"})


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


def make_run(path: Path) -> RunDirectory:
    with (run := open_run(path)).lock():
        return run


def test_the_configuration_is_stored_whole_and_reopened(tmp_path: Path) -> None:
    make_run(tmp_path)
    settings = LoopConfig().model_dump(mode="json")
    stored = json.loads((tmp_path / "config.json").read_text())
    assert stored == {"format": 1, "kind": "toy", "config": settings}
    assert open_run(tmp_path).config == settings
    assert RunDirectory.existing(tmp_path).kind == "toy"


def test_another_configuration_is_refused_by_its_fields(tmp_path: Path) -> None:
    make_run(tmp_path)
    before = (tmp_path / "config.json").read_bytes()
    said = rf"{re.escape(str(tmp_path))}.* optimiser\.lr is 0\.001 there and 0\.2 here"
    with pytest.raises(InputError, match=said):
        open_run(tmp_path, optimiser={"lr": 0.2})
    with pytest.raises(InputError, match=r"steps is 1000 .* \(1 more differ: optimiser\.lr\)"):
        open_run(tmp_path, steps=2000, threads=9, optimiser={"lr": 0.2})
    assert open_run(tmp_path, threads=2).config["threads"] == 1
    assert (tmp_path / "config.json").read_bytes() == before


@pytest.mark.parametrize("content", ['{"kind": "toy", "conf', "[1]", '{"kind": "toy"}', "\xff\x00"])
def test_a_damaged_configuration_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content, encoding="latin-1")
    with pytest.raises(InputError, match=r"config\.json is damaged"):
        open_run(tmp_path)


def test_a_place_that_holds_something_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    with pytest.raises(InputError, match="kind 'toy', expected 'other'"):
        RunDirectory.open(tmp_path / "run", LoopConfig(), "other")
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
    assert names(mine) == ["thesis.tex"]


def test_another_configuration_that_came_between_open_and_lock_is_refused(tmp_path: Path) -> None:
    first, second = open_run(tmp_path), open_run(tmp_path, steps=2000)
    with first.lock():
        stored = (tmp_path / "config.json").read_bytes()
        with pytest.raises(InputError, match="steps is 1000 there and 2000 here"), second.lock():
            pass
    assert (tmp_path / "config.json").read_bytes() == stored


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


@contextmanager
def holding(*program: str) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", *program], stdout=subprocess.PIPE) as command:
        assert command.stdout is not None
        assert command.stdout.readline() == b"held\n"
        yield command


@pytest.mark.parametrize("orphaned", [False, True])
def test_a_killed_command_is_waited_for(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], orphaned: bool
) -> None:
    run, holds = open_run(tmp_path), HOLDS.format(saves=1.5)
    lock = str(tmp_path / ".lock")
    with holding(*([STARTS, lock, holds] if orphaned else [holds, lock])) as command:
        command.kill()  # And nobody waits for it before the next command comes.
        with run.lock():
            pass
    # The orphan saves its state first, and whoever waits for it says so.
    assert not orphaned or "waiting for process" in capfd.readouterr().err


def test_a_worker_whose_command_is_alive_is_not_waited_for(tmp_path: Path) -> None:
    run = open_run(tmp_path)
    with holding(STARTS, str(tmp_path / ".lock"), HOLDS.format(saves=0.0)) as command:
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
        assert names(tmp_path) == [".lock", ".mine", "checkpoints", "config.json"]
    assert not names(tmp_path / "checkpoints")


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
def test_first_difference(stored: object, wanted: object, expected: object) -> None:
    assert first_difference(stored, wanted) == expected


def tensors(step: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((2, 3), float(step)), "n": torch.tensor(step)}


def filled(path: Path, *steps: int) -> Checkpoints:
    checkpoints = Checkpoints(path)
    for step in steps:
        checkpoints.save(step, tensors(step), {"loss": step / 3})
    return checkpoints


def latest(checkpoints: Checkpoints) -> Checkpoint:
    found = checkpoints.latest()
    assert found is not None
    torch.testing.assert_close(found.tensors, tensors(found.step), rtol=0, atol=0)
    return found


def test_round_trip_and_the_last_two_are_kept(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "absent").latest() is None
    checkpoint = latest(filled(tmp_path, 1, 5, 10))
    assert (checkpoint.step, checkpoint.meta) == (10, {"loss": 10 / 3})
    assert names(tmp_path) == ["step-00000005", "step-00000010"]


def harm(file: Path, how: str) -> None:
    content = file.read_bytes()
    changed = content[: len(content) // 2]
    if how == "a bit flipped":
        changed = content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]
    file.write_bytes(changed)
    if how == "removed":
        file.unlink()


@pytest.mark.parametrize("file", ["tensors.safetensors", "meta.json"])
@pytest.mark.parametrize("how", ["cut", "a bit flipped", "removed"])
def test_a_damaged_one_is_named_and_the_one_before_it_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, how: str
) -> None:
    checkpoints = filled(tmp_path, 1, 2)
    harm(tmp_path / "step-00000002" / file, how)
    assert latest(checkpoints).step == 1
    (said,) = capsys.readouterr().err.splitlines()
    assert "step-00000002" in said
    harm(tmp_path / "step-00000001" / "tensors.safetensors", "cut")
    # Nothing starts from scratch.
    with pytest.raises(InputError, match="every checkpoint"):
        checkpoints.latest()


def test_a_damaged_one_set_aside_neither_counts_nor_crowds_out(tmp_path: Path) -> None:
    checkpoints = filled(tmp_path, 10, 20)
    harm(tmp_path / "step-00000020" / "tensors.safetensors", "cut")
    checkpoints.set_aside_after(10)
    checkpoints.save(15, tensors(15), {})
    assert latest(checkpoints).step == 15
    assert names(tmp_path) == ["damaged-step-00000020", "step-00000010", "step-00000015"]


def test_a_full_disk_is_said_and_leaves_the_old_one_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = filled(tmp_path, 1)
    whole = Path.write_bytes

    def full(path: Path, content: bytes) -> int:
        whole(path, content[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(InputError, match="no space left on the disk"):
        checkpoints.save(2, tensors(2), {})
    monkeypatch.undo()
    assert names(tmp_path) == ["step-00000001"]
    assert latest(checkpoints).step == 1


def test_no_file_is_no_lines_and_a_damaged_line_is_named(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "m") == []
    MetricsLog(tmp_path / "m").truncate_after(4)
    with pytest.raises(ValueError, match="JSON"):
        MetricsLog(tmp_path / "nan").append({"step": 1, "loss": float("nan")})
    for torn in ("", '{"step": 2, "lo', '{"step": 2}'):
        (tmp_path / "m").write_text('{"step": 1}\n' + torn)
        assert read_metrics(tmp_path / "m") == [{"step": 1}]
    (tmp_path / "m").write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    for read in (read_metrics, lambda path: MetricsLog(path).truncate_after(3)):
        with pytest.raises(InputError, match="line 2"):
            read(tmp_path / "m")


def test_every_entry_is_timed_once_a_round_in_changing_order() -> None:
    said: list[str] = []
    entries = {name: (lambda name=name: said.append(name)) for name in "abc"}
    timings = interleave(entries, 5, warm=2, min_seconds=0.0)
    assert said[:6] == ["a", "a", "b", "b", "c", "c"]
    turns = [tuple(said[i : i + 3]) for i in range(6, len(said), 3)]
    assert len(turns) == 5
    assert all(sorted(turn) == ["a", "b", "c"] for turn in turns)
    assert len(set(turns)) > 1
    assert all(len(timing.rounds) == 5 and timing.calls == 1 for timing in timings.values())
    assert Timing((3.0, 1.0, 2.0)).median == 2.0
    # A quick one is called many times a sample.
    calls: list[int] = []
    timing = interleave({"a": lambda: calls.append(1)}, 2, warm=1, min_seconds=1e-3)["a"]
    assert timing.calls > 1
    assert len(calls) == 1 + 2 * timing.calls
