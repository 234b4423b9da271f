"""A study in the test's own process: its cells one after another, killed where a test says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from normattn.sweep import cell as cell_module
from normattn.sweep import layout
from normattn.sweep.cell import run_cell
from normattn.sweep.layout import CellPaths, write_if_changed
from normattn.sweep.study import Sweep


class Killed(BaseException):
    """The power went."""


def run(sweep: Sweep) -> None:
    """Every cell, then the report."""
    for cell in sweep.cells:
        paths = CellPaths.of(sweep.out, cell.variant, cell.seed)
        write_if_changed(paths.settings, cell.model_dump(mode="json"))
        assert run_cell(paths.job) == 0
    sweep.report(sweep.out)


def run_killed(sweep: Sweep, every: int, monkeypatch: pytest.MonkeyPatch) -> int:
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
                run(sweep)
            except Killed:
                kills += 1
            else:
                return kills


def files(out: Path) -> dict[str, bytes]:
    """Every file that a reader gets."""
    found = [*sorted(out.glob("table.*")), *sorted((out / "figures").glob("*"))]
    return {file.name: file.read_bytes() for file in found}
