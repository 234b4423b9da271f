"""Terminal output: a table, the end of a report, a progress bar."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, TypeVar

from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from normattn.lab.report.output import Written
from normattn.lab.report.tables import FilledTable
from normattn.terminal import Console

_NO_WRAP = 24
"""Columns up to this width are not wrapped."""


def print_table(table: FilledTable, title: str = "") -> None:
    """Print a table, all but its first column right-aligned."""
    console = Console(highlight=False)
    if title:
        console.print(title, markup=False, soft_wrap=True)
    shown = Table(box=None, padding=(0, 0, 0, 2), pad_edge=False)
    texts = [[cell.text for cell in line] for line in table.cells]
    for index, column in enumerate(table.columns):
        short = max(len(line[index]) for line in texts) <= _NO_WRAP
        shown.add_column(column.title, justify="right" if index else "left", no_wrap=short)
    for line in texts:
        shown.add_row(*map(escape, line))
    console.print(shown)


def print_report(out: Path, written: Written) -> None:
    """Print the "In short" and the paths of a report."""
    for line in ("In short", *(f"  {text}" for text in written.summary)) if written.summary else ():
        print_line(line)
    print_line(f"table: {out / 'table.md'}")
    print_line(f"report: {out / 'report.html'}")
    count = len(written.figures)
    print_line(f"figures: {out / 'figures'} ({count} file{'s' * (count != 1)})")


def print_line(sentence: str, console: Console | None = None) -> None:
    """Print a line unchanged, without wrapping."""
    output = console or Console(highlight=False)
    output.print(sentence, markup=False, soft_wrap=True)


AnyBar = TypeVar("AnyBar", bound="ProgressBar")


class ProgressBar:
    """A progress bar on stderr; where that is no terminal, only `print_line` prints."""

    def __init__(self, *columns: Any, **options: Any) -> None:
        self.console = Console(file=sys.stderr, highlight=False)
        self.progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            *columns,
            console=self.console,
            disable=not self.console.is_terminal,
            **options,
        )

    def __enter__(self: AnyBar) -> AnyBar:
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()

    def print_line(self, sentence: str) -> None:
        """Print a line above the bar."""
        print_line(sentence, self.console)
