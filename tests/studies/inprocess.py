"""A study in the test's own process: its cells one after another, killed where a test says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from normattn.measure import frame
from normattn.report.markdown import page_json, page_markdown, table_csv
from normattn.report.page import context
from normattn.sweep import cell as cell_module
from normattn.sweep import layout
from normattn.sweep.cell import run_cell
from normattn.sweep.layout import CellPaths, write_if_changed
from normattn.sweep.study import Study, Sweep


class Killed(BaseException):
    """The power went."""


def run(study: Study, sweep: Sweep) -> None:
    """Every cell, then the page."""
    for cell in sweep.cells:
        paths = CellPaths.of(sweep.out, cell.variant, cell.seed)
        write_if_changed(paths.settings, {"study": study.name, **cell.model_dump(mode="json")})
        assert run_cell(paths.job, lambda name: study) == 0
    write_page(study, sweep.out)


def write_page(study: Study, out: Path) -> None:
    """The frame and the page, its figures as values: they are drawn of nothing else."""
    measured = study.measurements(out)
    made = context(study.page, measured)
    frame.write(out / frame.FILE, measured)
    (out / "table.md").write_text(page_markdown(made))
    (out / "table.json").write_text(page_json(made))
    for table in made.tables:
        (out / f"{table.key}.csv").write_text(table_csv(table))
    for figure in made.figures:
        (out / f"{figure.name}.figure").write_text(repr(figure))


def run_killed(study: Study, sweep: Sweep, every: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """As `run`, but killed at the note of progress number `every`, 2 · `every`, … of each attempt.

    Returns how often it was killed before an attempt came to its end.
    """
    notes = kills = 0
    write = layout.note_progress

    def note(path: Path, value: dict[str, Any]) -> None:
        nonlocal notes
        write(path, value)
        notes += 1
        if notes == (kills + 1) * every:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(cell_module, "note_progress", note)
        patch.setattr(cell_module, "PROGRESS_SECONDS", 0.0)
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
    return {file.name: file.read_bytes() for file in sorted(out.glob("*.*")) if file.is_file()}
