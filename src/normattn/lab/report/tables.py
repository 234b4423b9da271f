"""Tables as values: rows and columns declared as data, filled from the measurements."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from normattn.lab.report.view import View
from normattn.lab.stats import Estimate, Metric
from normattn.lab.stats.arrays import Where
from normattn.lab.stats.measurements import FACTOR

FEW_SEEDS = 3
"""Trainings below which a row speaks of those models alone."""


@dataclass(frozen=True)
class Cell:
    """What one place of a table holds: the text, and the number it is made of, if any."""

    text: str
    estimate: Estimate | None = None


NOTHING = Cell("–")


@dataclass(frozen=True)
class Row:
    """A row: what it is called, and where its measurements are."""

    label: str
    where: Where


@dataclass(frozen=True)
class Column:
    """One quantity of every row: a metric, read where the row is.

    `acc.at(8) - acc.at(8, variant="Baseline")` is a difference to Baseline: what a metric says of
    its place goes before what the row says. `interval` False shows the value alone, as for a
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
            return NOTHING if self.without == NOTHING.text else Cell(self.without)
        return shown_cell(estimate, self.metric, self.interval)

    def estimates(self, view: View, rows: Sequence[Row]) -> tuple[Estimate | None, ...]:
        """The numbers of these rows."""
        return tuple(self.cell(view, row).estimate for row in rows)


def shown_cell(estimate: Estimate, metric: Metric, interval: bool = True) -> Cell:
    """A metric's value with its digits, and a sign if it is a difference."""
    return Cell(shown(estimate, metric.digits, metric.is_difference, interval), estimate)


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

    def markdown(self) -> str:
        """The table in Markdown."""
        return aligned([c.title for c in self.columns], [[c.text for c in r] for r in self.cells])

    def csv(self) -> str:
        """The table with the ends of every interval; a column without numbers as text."""
        ends = ("value", "low", "high")
        numeric = [
            any(cell.estimate for cell in column) for column in zip(*self.cells, strict=True)
        ]
        head: list[str] = []
        for column, number in zip(self.columns, numeric, strict=True):
            head += [column.key + end for end in (("", "_low", "_high") if number else ("",))]
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(head)
        for cells in self.cells:
            line: list[Any] = []
            for cell, number in zip(cells, numeric, strict=True):
                line += (
                    [getattr(cell.estimate, end, None) for end in ends] if number else [cell.text]
                )
            writer.writerow(line)
        return text.getvalue()

    def records(self) -> list[dict[str, Any]]:
        """Every row as values by column: numbers with their intervals, else text or None."""
        return [
            {
                column.key: cell.estimate.as_json()
                if cell.estimate
                else None
                if cell.text == NOTHING.text and column.key != "row"
                else cell.text
                for column, cell in zip(self.columns, cells, strict=True)
            }
            for cells in self.cells
        ]


@dataclass(frozen=True)
class Table:
    """A table: `rows` are found in the measurements, `columns` that no row fills are left out.

    `key` names its files (`table`, or `layers`, …).
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
        columns = self.columns(view) if callable(self.columns) else self.columns
        filled = [(column, [column.cell(view, row) for row in rows]) for column in columns]
        kept = [(c, cells) for c, cells in filled if any(cell is not NOTHING for cell in cells)]
        notes = self.notes(view) if callable(self.notes) else self.notes
        return Filled(
            self.key,
            self.title,
            self.intro,
            tuple(notes),
            (Column("row", self.head), *(column for column, _ in kept)),
            rows,
            tuple(
                (Cell(row.label), *(cells[number] for _, cells in kept))
                for number, row in enumerate(rows)
            ),
            self.main,
        )


def shown(
    value: Estimate | None, digits: int = 1, signed: bool = False, interval: bool = True
) -> str:
    """ "36.7 [35.9, 37.5]", or a dash where nothing was measured; `digits` after the point."""
    if value is None:
        return "–"
    # "z": a negative number that rounds to 0 is shown as 0, never as "-0.0".
    form = f"{'+' if signed else ''}z,.{digits}f"
    if not interval:
        return f"{value.value:{form}}"
    if value.low is None or value.high is None:
        return f"{value.value:{form}} [no interval]"
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
    """Which rows have which seeds: "0, 1, 2 of Baseline, KNA; 0 of CosA (depth 12)".

    Where a row's trainings vary in something that decides how many seeds they have, that is named.
    """
    trainings = frame.filter(protocol="training")
    factors = [
        name
        for name in frame.columns
        if name.startswith(FACTOR) and trainings[name].null_count() < trainings.height
    ]
    read = frame.filter((pl.col("protocol") != "training") | (pl.col("statistic") == "diverged"))
    groups: dict[tuple[int, ...], list[str]] = {}
    for row in sorted(frame["row"].unique().to_list()):
        own = read.filter(row=row) if read.filter(row=row).height else frame.filter(row=row)
        parts = (
            [(values, _seeds(part)) for values, part in own.group_by(factors)] if factors else []
        )
        if len({seeds for _, seeds in parts}) < 2:
            parts = [((), _seeds(own))]
        by_seeds: dict[tuple[int, ...], set[str]] = {}
        for values, seeds in parts:
            named = zip(factors, values, strict=False)
            words = [f"{_plain(name)} {value}" for name, value in named if value is not None]
            by_seeds.setdefault(seeds, set()).add(" ".join(words))
        for seeds, varied in sorted(by_seeds.items(), key=lambda part: -len(part[0])):
            more = ", ".join(sorted(filter(None, varied)))
            groups.setdefault(seeds, []).append(f"{row} ({more})" if more else row)
    ordered = groups.items()
    line = "; ".join(f"{', '.join(map(str, seeds))} of {', '.join(of)}" for seeds, of in ordered)
    few = any(len(seeds) < FEW_SEEDS for seeds in groups)
    warning = f". A row of fewer than {FEW_SEEDS} seeds speaks of those models, not of the score"
    return line + warning * few


def _seeds(rows: pl.DataFrame) -> tuple[int, ...]:
    return tuple(sorted(rows["seed"].unique().to_list()))


def _plain(factor: str) -> str:
    return factor.removeprefix(FACTOR).replace("_", " ")
