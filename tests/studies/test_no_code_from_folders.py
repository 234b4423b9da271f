"""A study file runs when its path is typed, and never because a folder names it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import polars as pl
import pytest

from normattn.cli.app import main
from normattn.lab.stats import measurements
from normattn.lab.sweep.launchers import Local
from studies import here
from undrawn import undraw

HELPER = """
from pathlib import Path
Path(__file__).with_name("it-ran").write_text("")
"""


def _run(*words: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.fixture(scope="module")
def trained(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small study of the library, made in full."""
    out = tmp_path_factory.mktemp("trained") / "out"
    few = ("--variants", "Baseline", "--methods", "unmodified", "--set", "training.steps=2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Local, "session", here.session)
        undraw(patch)
        assert _run("reproduce", "keynorm", "--preset", tiny, *few, "--out", out) == 0
    return out


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    """A copy with a helper.py beside it that leaves a mark where it is run."""
    out = tmp_path / "out"
    shutil.copytree(trained, out)
    (out / "helper.py").write_text(HELPER)
    return out


def _cell(folder: Path, named: str) -> None:
    for file in folder.glob("jobs/*/*/*.json"):
        file.write_text(json.dumps({**json.loads(file.read_text()), "study": named}))


def _kind(folder: Path, named: str) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "kind": named}))
    for jobs in folder.glob("jobs/*/*/cell.json"):
        jobs.unlink()
    shutil.rmtree(folder / "cells")


def _frame(folder: Path, named: str) -> None:
    for name in ("jobs", "cells"):
        shutil.rmtree(folder / name)
    measured = measurements.read(folder / measurements.FILE)
    measurements.write(
        folder / measurements.FILE, measured.with_columns(pl.lit(named).alias("study"))
    )


@pytest.mark.parametrize("spelled", ["{}/helper.py", "helper.py", "../out/helper"])
@pytest.mark.parametrize("place", [_cell, _kind, _frame])
def test_report_runs_no_file_that_a_folder_names(
    place: object,
    spelled: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert callable(place)
    monkeypatch.chdir(folder)
    place(folder, spelled.format(folder))
    assert _run("report", folder) == 2
    assert not (folder / "it-ran").exists()
    assert "helper" in capsys.readouterr().err


def test_a_child_takes_its_study_from_its_command_line(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _cell(folder, f"{folder}/helper.py")
    job = next(folder.glob("jobs/*/*"))
    assert _run("_cell", "--study", "keynorm", job) == 2
    assert not (folder / "it-ran").exists()
    assert "cell.json" in capsys.readouterr().err


def test_a_run_of_the_folder_runs_no_file_either(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    run = next(folder.glob("cells/*/seed0"))
    for file in run.rglob("*.json"):
        stored = json.loads(file.read_text())
        if isinstance(stored, dict):
            file.write_text(json.dumps({**stored, "study": "helper.py", "kind": "helper.py"}))
    for words in (
        ("evaluate", run),
        ("generate", run, "--prompt", "a"),
        ("export", run, tmp_path / "exported"),
        ("report", run, "--out", tmp_path / "page"),
    ):
        assert _run(*words) == 2, words
        assert not (folder / "it-ran").exists(), words


def test_a_file_that_is_typed_is_run(folder: Path) -> None:
    assert _run("report", folder, "--study", folder / "helper.py") == 2  # it defines no STUDY
    assert (folder / "it-ran").exists()


FAILING = {
    "raises": ("x = 1\n\n\ndef ask():\n    return {}['lengths']\n\n\nask()\n", 5, "KeyError"),
    "lacks a module": ("import os\nimport no_such_module_here\n", 2, "no_such_module_here"),
    "ends the process": ("import sys\nsys.exit(7)\n", 2, "sys.exit"),
    "ends quietly": ("raise SystemExit\n", 1, "sys.exit"),
    "is no Python": ("x = 1\nSTUDY = Study(\n", 2, "never closed"),
    "fails below": ("import json\njson.loads('{')\n", 2, "JSONDecodeError"),
}


@pytest.mark.parametrize("case", FAILING)
@pytest.mark.parametrize("command", ["reproduce", "report"])
def test_a_study_file_that_fails_is_named_with_its_line(
    command: str, case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, line, reason = FAILING[case]
    path = tmp_path / "mine.py"
    path.write_text(text)
    (tmp_path / "results").mkdir()
    words = {
        "reproduce": ("reproduce", path, "--plan"),
        "report": ("report", tmp_path / "results", "--study", path),
    }
    if command == "report":
        measurements.write(tmp_path / "results" / measurements.FILE, measurements.empty())
    assert _run(*words[command]) == 2
    said = capsys.readouterr().err
    sentence = said.strip().splitlines()[-1]
    assert str(path) in sentence
    assert f"line {line}" in sentence
    assert reason in sentence
    if case != "is no Python":
        assert said.startswith("Traceback")
        assert "normattn/" not in said.replace(str(tmp_path), "")


def test_a_study_that_fails_while_it_is_asked_is_named_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from normattn.lab.studies import find

    assert find("keynorm")
    path = tmp_path / "mine.py"
    path.write_text(
        "from normattn.lab.studies.keynorm import STUDY as THEIRS\n"
        "def resolve(request):\n"
        "    return 1 / 0\n"
        "from copy import copy\n"
        "STUDY = copy(THEIRS)\n"
        "vars(STUDY).update(name='mine', resolve=resolve)\n"
    )
    assert _run("reproduce", path, "--plan") == 2
    sentence = capsys.readouterr().err.strip().splitlines()[-1]
    assert f"{path}, line 3: ZeroDivisionError" in sentence
