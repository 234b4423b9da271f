"""A study in the test's own process: its runs one after another, killed where a test says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from normattn.lab.report.output import page_json, page_markdown
from normattn.lab.report.page import context
from normattn.lab.stats import measurements
from normattn.lab.studies.base import Study
from normattn.lab.sweep import paths as sweep_paths
from normattn.lab.sweep import runner
from normattn.lab.sweep.paths import write_if_changed
from normattn.lab.sweep.run import Run, Sweep

PAGE = "page"


class Killed(BaseException):
    """The power went."""


def run(study: Study, sweep: Sweep) -> None:
    """Every run, then the page."""
    for each in sweep.runs:
        assert one_run(study, sweep, each) == 0
    write(study, sweep.out)


def one_run(study: Study, sweep: Sweep, each: Run) -> int:
    """Do one run; return its exit code."""
    paths = sweep.paths(each)
    write_if_changed(paths.settings, {"study": study.name, **each.model_dump(mode="json")})
    return runner.run_child(paths.job, study)


def write(study: Study, out: Path) -> None:
    """The numbers of the page and the values of its figures, which take long to draw."""
    measured = study.measurements(out)
    made = context(study.page, measured)
    page = out / PAGE
    page.mkdir(exist_ok=True)
    measurements.write(page / measurements.FILE, measured)
    (page / "table.md").write_text(page_markdown(made))
    (page / "table.json").write_text(page_json(made))
    (page / "figures.txt").write_text("\n".join(map(repr, made.figures)))
    for table in made.tables:
        (page / f"{table.key}.csv").write_text(table.csv())


def run_killed(study: Study, sweep: Sweep, every: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """As `run`, but killed at the note of progress number `every`, 2 · `every`, … of each attempt.

    Returns how often it was killed before an attempt came to its end.
    """
    notes = kills = 0

    def note(path: Path, value: dict[str, Any]) -> None:
        nonlocal notes
        sweep_paths.write_progress(path, value)
        notes += 1
        if notes == (kills + 1) * every:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(runner, "write_progress", note)
        patch.setattr(runner, "PROGRESS_SECONDS", 0.0)
        while True:
            notes = 0
            try:
                run(study, sweep)
            except Killed:
                kills += 1
            else:
                return kills


def files(out: Path) -> dict[str, bytes]:
    """Every file that a reader gets."""
    return {file.name: file.read_bytes() for file in sorted((out / PAGE).iterdir())}


def tables(out: Path) -> dict[str, list[dict[str, Any]]]:
    """The tables of the page by their keys."""
    found: dict[str, list[dict[str, Any]]] = json.loads(files(out)["table.json"])["tables"]
    return found
