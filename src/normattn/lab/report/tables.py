"""Tables as values: rows and columns declared as data, filled from the measurements."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from normattn.lab.report.view import View
from normattn.lab.stats import Estimate, Metric
from normattn.lab.stats.arrays import Where
from normattn.lab.stats.measurements import FACTOR

FEW_SEEDS = 3
"""A row with fewer trainings describes those models, not the score."""
_NUMBER = re.compile(r"[-+]?\d[\d,]*(\.\d+)?(e[-+]?\d+)?")


@dataclass(frozen=True)
class Cell:
    """What one place of a table holds: the text, and the number it is made of, if any."""

    text: str
    estimate: Estimate | None = None

    @property
    def number(self) -> float | None:
        """The estimate, or a text that is a number; None for words."""
        if self.estimate is not None:
            return self.estimate.value
        return float(self.text.replace(",", "")) if _NUMBER.fullmatch(self.text) else None

    @property
    def parts(self) -> tuple[str, str]:
        """The value and the interval of "36.7 [35.9, 37.5]"."""
        value, bracket, interval = self.text.partition(" [")
        return value, bracket[1:] + interval


NOTHING = Cell("–")


@dataclass(frozen=True)
class Row:
    """A row: what it is called, and where its measurements are."""

    label: str
    where: Where


@dataclass(frozen=True)
class Column:
    """One quantity of every row: a metric, read where the row is.

    `acc.at(8) - acc.at(8, variant="Baseline")` is a difference to Baseline: where a metric
    names a place, it goes before the row's. `interval` False shows the value alone, as for a
    number of parameters. `plain` makes the cell from the view instead, for what is no metric;
    `without` is the text where nothing was counted.
    """

    key: str
    title: str
    metric: Metric | None = None
    interval: bool = True
    plain: Callable[[View, Row], Cell] | None = None
    without: str = "–"

    def cell(self, view: View, row: Row) -> Cell:
        """This column of a row."""
        if self.plain is not None:
            return self.plain(view, row)
        assert self.metric is not None
        estimate = view.estimate(self.metric, row.where)
        if estimate is None:
            return NOTHING
        if not math.isfinite(estimate.value):
            return Cell(self.without)
        digits, signed = self.metric.digits, self.metric.is_difference
        return Cell(shown(estimate, digits, signed, self.interval), estimate)

    def estimates(self, view: View, rows: Sequence[Row]) -> tuple[Estimate | None, ...]:
        """The numbers of these rows."""
        return tuple(self.cell(view, row).estimate for row in rows)


def text_column(key: str, title: str, text: Callable[[View, Row], object]) -> Column:
    """A column of words; a dash where there are none."""

    def cell(view: View, row: Row) -> Cell:
        words = text(view, row)
        return NOTHING if words in (None, "") else Cell(str(words))

    return Column(key, title, plain=cell)


def estimate_column(
    key: str,
    title: str,
    estimated: Callable[[View, Row], Estimate | None],
    text: Callable[[Estimate], str],
) -> Column:
    """A column of numbers that are no metric, each with its text."""

    def cell(view: View, row: Row) -> Cell:
        estimate = estimated(view, row)
        return NOTHING if estimate is None else Cell(text(estimate), estimate)

    return Column(key, title, plain=cell)


@dataclass(frozen=True)
class Filled:
    """A table with its cells, ready for a report: `cells` are (rows, columns).

    `main`: the keys of the columns that are shown first; the others are behind a switch. Empty: all
    are shown.
    """

    key: str
    title: str
    intro: str
    notes: tuple[str, ...]
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    cells: tuple[tuple[Cell, ...], ...]
    main: tuple[str, ...] = ()

    @property
    def words(self) -> tuple[int, ...]:
        """The columns that are aligned to the left: the first, and those without numbers."""
        columns = enumerate(zip(*self.cells, strict=True))
        return tuple(n for n, cells in columns if not n or all(c.number is None for c in cells))

    @property
    def hidden(self) -> tuple[int, ...]:
        """The columns behind a switch."""
        columns = enumerate(self.columns)
        return tuple(n for n, c in columns if n and self.main and c.key not in self.main)

    def markdown(self) -> str:
        """The columns that are shown first, in Markdown."""
        shown = [n for n in range(len(self.columns)) if n not in self.hidden]
        lines = [[line[n].text for n in shown] for line in self.cells]
        left = [place for place, n in enumerate(shown) if n in self.words]
        return aligned([self.columns[n].title for n in shown], lines, left)

    def csv(self) -> str:
        """The table with the ends of every interval; a column without numbers as text."""
        columns = []
        for column, cells in zip(self.columns, zip(*self.cells, strict=True), strict=True):
            if not any(cell.estimate for cell in cells):
                columns.append([column.key, *(cell.text for cell in cells)])
                continue
            for name, end in (("", "value"), ("_low", "low"), ("_high", "high")):
                numbers = [getattr(cell.estimate, end, None) for cell in cells]
                columns.append([column.key + name, *numbers])
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(zip(*columns, strict=True))
        return text.getvalue()

    def records(self) -> list[dict[str, Any]]:
        """Every row as values by column: numbers with their intervals, else text or None."""

        def value(column: Column, cell: Cell) -> Any:
            if cell.estimate:
                return cell.estimate.as_json()
            return None if cell == NOTHING and column.key != "row" else cell.text

        return [
            {
                column.key: value(column, cell)
                for column, cell in zip(self.columns, line, strict=True)
            }
            for line in self.cells
        ]


@dataclass(frozen=True)
class Table:
    """A table: `rows` are found in the measurements, `columns` that no row fills are left out.

    `key` names its files (`table`, or `layers`, …), `head` is above its rows.
    """

    key: str
    title: str
    rows: Callable[[View], Sequence[Row]]
    columns: tuple[Column, ...] | Callable[[View], Sequence[Column]]
    intro: str = ""
    notes: tuple[str, ...] | Callable[[View], Sequence[str]] = ()
    head: str = "score"
    main: tuple[str, ...] = ()

    def fill(self, view: View) -> Filled:
        """The table made from measurements."""
        rows = tuple(self.rows(view))
        shown = [Column("row", self.head, plain=lambda view, row: Cell(row.label))]
        shown += self.columns(view) if callable(self.columns) else self.columns
        filled = [(column, [column.cell(view, row) for row in rows]) for column in shown]
        kept = [(c, cells) for c, cells in filled if any(cell != NOTHING for cell in cells)]
        notes = self.notes(view) if callable(self.notes) else self.notes
        return Filled(
            *(self.key, self.title, f"{self.intro} {_without_intervals(kept)}".strip()),
            notes=tuple(notes),
            columns=tuple(column for column, _ in kept),
            rows=rows,
            cells=tuple(zip(*(cells for _, cells in kept), strict=True)),
            main=self.main,
        )


def _without_intervals(columns: Iterable[tuple[Column, Sequence[Cell]]]) -> str:
    """Why measured values of a table have no interval; nothing where all have one."""
    metrics = [cells for column, cells in columns if column.metric and column.interval]
    found = [cell.estimate for cells in metrics for cell in cells if cell.estimate]
    known = [value.low is not None and not value.of_few_units for value in found]
    if all(known):
        return ""
    if not any(known):
        return "There are no intervals: too few documents, windows or seeds were measured."
    return "A value without brackets was measured too few times, or is the same everywhere."


def shown(
    value: Estimate | None, digits: int = 1, signed: bool = False, interval: bool = True
) -> str:
    """ "36.7 [35.9, 37.5]", or a dash where nothing was measured; `digits` after the point.

    A value that was measured once or twice, or is the same in every unit, has no interval to show.
    """
    if value is None:
        return "–"
    # "z": a negative number that rounds to 0 is shown as 0, never as "-0.0".
    form = f"{'+' if signed else ''}z,.{digits}f"
    if not interval or value.low is None or value.low == value.high or value.of_few_units:
        return f"{value.value:{form}}"
    return f"{value.value:{form}} [{value.low:{form}}, {value.high:{form}}]"


def span(counts: Sequence[int]) -> str:
    """Ascending counts by their ends, "49 to 1,024", or the one that all of them are."""
    first, last = f"{counts[0]:,}", f"{counts[-1]:,}"
    return first if first == last else f"{first} to {last}"


def aligned(head: Sequence[str], lines: Iterable[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """An aligned Markdown table; the columns of `left` to the left, the others to the right."""
    every = [
        [text.replace("|", "\\|").replace("\n", " ") for text in line] for line in (head, *lines)
    ]
    widths = [max(map(len, column)) for column in zip(*every, strict=True)]
    sides = ["<" if index in left else ">" for index in range(len(head))]
    rule = ["-" * (w - (s == ">")) + ":" * (s == ">") for w, s in zip(widths, sides, strict=True)]
    padded = [
        [f"{text:{side}{width}}" for text, side, width in zip(line, sides, widths, strict=True)]
        for line in every
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in (padded[0], rule, *padded[1:]))


def seeds_line(frame: pl.DataFrame) -> str:
    """Which rows have which seeds: "0, 1, 2 of Baseline, KNA; 0 of CosA".

    A training that was not evaluated counts where it diverged, or where its row never was.
    """
    read = frame.filter((pl.col("protocol") != "training") | (pl.col("statistic") == "diverged"))
    groups: dict[tuple[int, ...], list[str]] = {}
    for row in sorted(frame["row"].unique().to_list()):
        own = read.filter(row=row) if read.filter(row=row).height else frame.filter(row=row)
        groups.setdefault(tuple(sorted(own["seed"].unique().to_list())), []).append(row)
    line = "; ".join(f"{', '.join(map(str, s))} of {', '.join(rows)}" for s, rows in groups.items())
    few = any(len(seeds) < FEW_SEEDS for seeds in groups)
    warning = f". A row of fewer than {FEW_SEEDS} seeds speaks of those models, not of the score"
    return line + warning * few


def plain_factor(column: str) -> str:
    """The words for the column of a factor: "factor.warm_up" as "warm up"."""
    return column.removeprefix(FACTOR).replace("_", " ")
