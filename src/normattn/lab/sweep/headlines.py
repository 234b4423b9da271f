"""The rows of a study's table as its cells end, so that nobody waits for the last one."""

from __future__ import annotations

from dataclasses import replace

from normattn.lab.report.table import NOTHING
from normattn.lab.report.view import View
from normattn.lab.stats import collected
from normattn.lab.stats.gather import on_common_sets
from normattn.lab.sweep.layout import CellPaths
from normattn.lab.sweep.study import Cell, Study, Sweep


def headlines(study: Study, sweep: Sweep, cell: Cell) -> list[str]:
    """What the study's `headline` columns say of one cell: a line for each of its rows.

    "  KNA-YaRN: train length 31.2, change −2.1". These are values of this cell's seed alone,
    without intervals; the page at the end has those.
    """
    if not study.headline:
        return []
    run = CellPaths.of(sweep.out, cell.variant, cell.seed).run
    view = View(on_common_sets(collected(run), ()))
    table = study.page.tables[0]
    columns = table.columns(view) if callable(table.columns) else table.columns
    shown = [replace(column, interval=False) for column in columns if column.key in study.headline]
    lines = []
    for row in table.rows(view):
        cells = [(column.title, column.cell(view, row)) for column in shown]
        said = [f"{title} {made.text}" for title, made in cells if made is not NOTHING]
        lines.append(f"  {row.label}: {', '.join(said)}")
    return lines
