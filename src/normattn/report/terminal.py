"""What the terminal shows of a page: a table without lines, and where the files are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from normattn.report.table import Filled

_SHORT = 24
"""Cells up to this width are not broken into lines."""


def print_table(table: Filled, title: str = "") -> None:
    """Print the cells of a table, numbers to the right."""
    console = Console(highlight=False)
    if title:
        console.print(title, markup=False, soft_wrap=True)
    shown = Table(box=None, padding=(0, 0, 0, 2), pad_edge=False)
    texts = [[cell.text for cell in line] for line in table.cells]
    for place, column in enumerate(table.columns):
        short = max(len(line[place]) for line in texts) <= _SHORT
        shown.add_column(column.title, justify="right" if place else "left", no_wrap=short)
    for line in texts:
        shown.add_row(*map(escape, line))
    console.print(shown)


def say(out: Path, figures: Sequence[Path]) -> None:
    """Print where a page and its figures are."""
    said = Console(highlight=False)
    said.print(f"table: {out / 'table.md'}", markup=False, soft_wrap=True)
    said.print(f"page: {out / 'report.html'}", markup=False, soft_wrap=True)
    said.print(f"figures: {out / 'figures'} ({len(figures)} files)", markup=False, soft_wrap=True)
