"""What the folder of a study decides: work that is done, its page, and never which code runs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest

from normattn.lab.stats import measurements
from studies.conftest import FINISHED, run
from studies.test_sweep import result

pytestmark = pytest.mark.usefixtures("runs_here")
RETROFIT = (
    *("--variants", "KNA", "--set", "training.steps=2", "--set", "continued.steps=2"),
    *("--set", "continued.keep=[1,2]", "--set", "continued.warmup_steps=0"),
)
HELPER = """
from pathlib import Path
Path(__file__).with_name("it-ran").write_text("")
"""


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    """A copy of a finished study, with a helper.py beside it that leaves a mark where it is run."""
    out = tmp_path / "out"
    shutil.copytree(finished, out)
    (out / "helper.py").write_text(HELPER)
    return out


def _again(study: str, tiny: Path, out: Path) -> bytes:
    words = FINISHED if study == "keynorm" else RETROFIT
    assert run("reproduce", study, "--preset", tiny, *words, "--out", out) == 0
    return (out / "measurements.parquet").read_bytes()


@pytest.mark.parametrize("study", ["keynorm", "retrofit"])
def test_files_of_other_names_do_not_make_up_for_lost_ones(
    study: str, tiny: Path, folder: Path, tmp_path: Path
) -> None:
    out = folder if study == "keynorm" else tmp_path / "retrofit"
    whole = _again(study, tiny, out)
    records = {path: path.read_bytes() for path in out.glob("*/**/*.parquet")}
    lost = sorted(records)[0]
    for place in {path.parent for path in records}:
        copies = [path for path in records if path.parent == place]
        for number, path in enumerate(copies):
            path.with_name(f".other-{number}.parquet").write_bytes(b"")
    lost.rename(lost.with_name(".lost"))
    assert _again(study, tiny, out) == whole
    assert lost.read_bytes() == records[lost]


def test_a_lost_or_damaged_marker_costs_a_look_and_no_digit(tiny: Path, folder: Path) -> None:
    whole = (folder / "measurements.parquet").read_bytes()
    (marker,) = folder.glob("cells/*/*/evaluations/done.json")
    for content in (None, "{"):
        before = marker.read_bytes()
        marker.unlink() if content is None else marker.write_text(content)
        assert _again("keynorm", tiny, folder) == whole
        assert marker.read_bytes() == before


def test_what_evaluate_measures_of_a_run_is_not_on_the_page_of_its_study(
    folder: Path, tmp_path: Path
) -> None:
    """Further windows and methods of its protocols, and a protocol that it does not have."""
    before, cell = result(folder), folder / "cells" / "KNA" / "seed0"
    own = {path.name for path in (cell / "evaluations").iterdir()}
    asked = (
        *("evaluate", cell, "--max-windows", 4, "--multiples", "1,2,4"),
        *("--methods", "unmodified,NTK", "--protocols"),
    )
    for protocols in ("train-length,last-segment", "by-position"):
        assert run(*asked, protocols) == 0
    beside = {p: p.stat().st_mtime_ns for p in (cell / "evaluations" / "beside").iterdir()}
    assert len(beside) == 2 * (1 + 3 + 1)
    assert not own & {path.name for path in beside}
    assert run(*asked, "by-position") == 0
    assert {path: path.stat().st_mtime_ns for path in beside} == beside
    assert run("report", folder) == 0
    assert result(folder) == before
    assert run("export", cell, tmp_path / "model") == 0
    page = tmp_path / "page"
    assert run("report", cell, "--out", page) == 0
    found = json.loads((page / "table.json").read_text())["tables"]["table"]
    assert [row["row"] for row in found] == ["KNA", "KNA-NTK"]


# No code from folders


def _job(folder: Path, named: str) -> None:
    for file in folder.glob("jobs/*/*/*.json"):
        file.write_text(json.dumps({**json.loads(file.read_text()), "study": named}))


def _kind(folder: Path, named: str) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "kind": named}))
    for jobs in folder.glob("jobs/*/*/cell.json"):
        jobs.unlink()
    shutil.rmtree(folder / "cells", ignore_errors=True)


def _measurements(folder: Path, named: str) -> None:
    for name in ("jobs", "cells"):
        shutil.rmtree(folder / name, ignore_errors=True)
    measured = measurements.read(folder / measurements.FILE)
    measurements.write(
        folder / measurements.FILE, measured.with_columns(pl.lit(named).alias("study"))
    )


@pytest.mark.parametrize("place", [_job, _kind, _measurements])
def test_report_runs_no_file_that_a_folder_names(
    place: Callable[[Path, str], None],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    for spelled in (f"{folder}/helper.py", "helper.py", "../out/helper"):
        place(folder, spelled)
        assert run("report", folder) == 2
        assert not (folder / "it-ran").exists()
        assert "helper" in capsys.readouterr().err


def test_a_run_takes_its_study_from_its_command_line(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _job(folder, f"{folder}/helper.py")
    assert run("_cell", "--study", "keynorm", next(folder.glob("jobs/*/*"))) == 2
    assert not (folder / "it-ran").exists()
    assert "cell.json" in capsys.readouterr().err


def test_a_run_of_the_folder_runs_no_file_either(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    place = next(folder.glob("cells/*/seed0"))
    for file in place.rglob("*.json"):
        stored = json.loads(file.read_text())
        if isinstance(stored, dict):
            file.write_text(json.dumps({**stored, "study": "helper.py", "kind": "helper.py"}))
    for words in (
        ("evaluate", place),
        ("generate", place, "--prompt", "a"),
        ("export", place, tmp_path / "exported"),
        ("report", place, "--out", tmp_path / "page"),
    ):
        assert run(*words) == 2, words
        assert not (folder / "it-ran").exists(), words


def test_a_file_that_is_typed_is_run(folder: Path) -> None:
    assert run("report", folder, "--study", folder / "helper.py") == 2  # it defines no STUDY
    assert (folder / "it-ran").exists()


FAILING = {
    "raises": ("x = 1\n\n\ndef ask():\n    return {}['lengths']\n\n\nask()\n", 5, "KeyError"),
    "lacks a module": ("import os\nimport no_such_module_here\n", 2, "no_such_module_here"),
    "ends the process": ("import sys\nsys.exit(7)\n", 2, "sys.exit"),
    "is not valid Python": ("x = 1\nSTUDY = Study(\n", 2, "never closed"),
    "fails below": ("import json\njson.loads('{')\n", 2, "JSONDecodeError"),
    "fails when it is asked": (
        "from copy import copy\n"
        "from normattn.lab.studies.keynorm import STUDY as THEIRS\n"
        "def resolve(request):\n"
        "    return 1 / 0\n"
        "STUDY = copy(THEIRS)\n"
        "vars(STUDY).update(name='mine', resolve=resolve)\n",
        4,
        "ZeroDivisionError",
    ),
}


@pytest.mark.parametrize("case", FAILING)
def test_a_study_file_that_fails_is_named_with_its_line(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, line, reason = FAILING[case]
    path = tmp_path / "mine.py"
    path.write_text(text)
    assert run("reproduce", path, "--plan") == 2
    said = capsys.readouterr().err
    sentence = said.strip().splitlines()[-1]
    for word in (str(path), f"line {line}", reason):
        assert word in sentence
    if case != "is not valid Python":
        assert "Traceback" in said
        assert "normattn/" not in said.replace(str(tmp_path), "")
