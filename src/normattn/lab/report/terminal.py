"""What the terminal shows: a table, the end of a report, a bar of progress."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, TypeVar

from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from normattn.lab.report.output import Written
from normattn.lab.report.tables import Filled
from normattn.terminal import Console

_SHORT = 24
"""Cells up to this width are not broken into lines."""


def print_table(table: Filled, title: str = "") -> None:
    """Print the cells of a table, numbers to the right."""
    console = Console(highlight=False)
    if title:
        console.print(title, markup=False, soft_wrap=True)
    shown = Table(box=None, padding=(0, 0, 0, 2), pad_edge=False)
    texts = [[cell.text for cell in line] for line in table.cells]
    for index, column in enumerate(table.columns):
        short = max(len(line[index]) for line in texts) <= _SHORT
        shown.add_column(column.title, justify="right" if index else "left", no_wrap=short)
    for line in texts:
        shown.add_row(*map(escape, line))
    console.print(shown)


def say(out: Path, written: Written) -> None:
    """Print a report's "In short" and where the report is."""
    for line in ("In short", *(f"  {each}" for each in written.summary)) if written.summary else ():
        tell(line)
    tell(f"table: {out / 'table.md'}")
    tell(f"report: {out / 'report.html'}")
    count = len(written.figures)
    tell(f"figures: {out / 'figures'} ({count} file{'s' * (count != 1)})")


def tell(sentence: str, console: Console | None = None) -> None:
    """Print a line unchanged, however long."""
    output = console or Console(highlight=False)
    output.print(sentence, markup=False, soft_wrap=True)


OwnBar = TypeVar("OwnBar", bound="Bar")


class Bar:
    """A bar of progress on stderr; where that is no terminal, nothing but the lines that stay.

    `more` are further columns after the percentage.
    """

    def __init__(self, *more: Any, **options: Any) -> None:
        self.console = Console(file=sys.stderr, highlight=False)
        self.progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            *more,
            console=self.console,
            disable=not self.console.is_terminal,
            **options,
        )

    def __enter__(self: OwnBar) -> OwnBar:
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()

    def say(self, sentence: str) -> None:
        """A line that stays."""
        tell(sentence, self.console)
