"""Tables as values: rows and columns are declared as data and filled from measurements."""

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
"""The fewest trainings for a row to describe the score and not only those models."""
_NUMBER = re.compile(r"[-+]?\d[\d,]*(\.\d+)?(e[-+]?\d+)?")


@dataclass(frozen=True)
class Cell:
    """A cell of a table: its text, and the number behind it, if any."""

    text: str
    estimate: Estimate | None = None

    @property
    def number(self) -> float | None:
        """The estimate's value, or the text as a number; None where it is not one."""
        if self.estimate is not None:
            return self.estimate.value
        return float(self.text.replace(",", "")) if _NUMBER.fullmatch(self.text) else None

    @property
    def parts(self) -> tuple[str, str]:
        """The value and the interval of "36.7 [35.9, 37.5]"."""
        value, bracket, interval = self.text.partition(" [")
        return value, bracket[1:] + interval


EMPTY_CELL = Cell("–")


@dataclass(frozen=True)
class Row:
    """A row: its label, and the columns' values that select its measurements."""

    label: str
    where: Where


@dataclass(frozen=True)
class Column:
    """A column: a metric of each row.

    A selection in the metric has priority over the row's: `acc.at(8) - acc.at(8,
    variant="Baseline")` is the difference to Baseline. `interval` False shows the value only, as
    for a number of parameters. `plain` makes a cell that is not a metric. `without` is the text
    where nothing was counted.
    """

    key: str
    title: str
    metric: Metric | None = None
    interval: bool = True
    plain: Callable[[View, Row], Cell] | None = None
    without: str = "–"

    def cell(self, view: View, row: Row) -> Cell:
        """The cell of a row."""
        if self.plain is not None:
            return self.plain(view, row)
        assert self.metric is not None
        estimate = view.estimate(self.metric, row.where)
        if estimate is None:
            return EMPTY_CELL
        if not math.isfinite(estimate.value):
            return Cell(self.without)
        digits, signed = self.metric.digits, self.metric.is_difference
        return Cell(format_estimate(estimate, digits, signed, self.interval), estimate)

    def estimates(self, view: View, rows: Sequence[Row]) -> tuple[Estimate | None, ...]:
        """The estimates of these rows."""
        return tuple(self.cell(view, row).estimate for row in rows)


def text_column(key: str, title: str, text: Callable[[View, Row], object]) -> Column:
    """A column of texts; None and "" become a dash."""

    def cell(view: View, row: Row) -> Cell:
        value = text(view, row)
        return EMPTY_CELL if value in (None, "") else Cell(str(value))

    return Column(key, title, plain=cell)


def estimate_column(
    key: str,
    title: str,
    estimated: Callable[[View, Row], Estimate | None],
    text: Callable[[Estimate], str],
) -> Column:
    """A column of numbers that are not metrics, each with its text."""

    def cell(view: View, row: Row) -> Cell:
        estimate = estimated(view, row)
        return EMPTY_CELL if estimate is None else Cell(text(estimate), estimate)

    return Column(key, title, plain=cell)


@dataclass(frozen=True)
class FilledTable:
    """A table with its cells (rows, columns), ready for a report.

    `main` are the keys of the columns that are always shown (empty: all); a switch shows the rest.
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
    def left_aligned(self) -> tuple[int, ...]:
        """The indices of left-aligned columns: the first, and those without numbers."""
        columns = enumerate(zip(*self.cells, strict=True))
        return tuple(n for n, cells in columns if not n or all(c.number is None for c in cells))

    @property
    def hidden(self) -> tuple[int, ...]:
        """The indices of the columns behind a switch."""
        columns = enumerate(self.columns)
        return tuple(n for n, c in columns if n and self.main and c.key not in self.main)

    def markdown(self) -> str:
        """The columns that are always shown, in Markdown."""
        visible = [n for n in range(len(self.columns)) if n not in self.hidden]
        lines = [[line[n].text for n in visible] for line in self.cells]
        left = [index for index, n in enumerate(visible) if n in self.left_aligned]
        return markdown_table([self.columns[n].title for n in visible], lines, left)

    def csv(self) -> str:
        """The table as CSV, with the ends of every interval."""
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
        """Every row as a dictionary by column key: numbers with intervals, texts, or None."""
        records = []
        for line in self.cells:
            record: dict[str, Any] = {}
            for column, cell in zip(self.columns, line, strict=True):
                text = None if cell == EMPTY_CELL and column.key != "row" else cell.text
                record[column.key] = cell.estimate.as_json() if cell.estimate else text
            records.append(record)
        return records


@dataclass(frozen=True)
class Table:
    """The declaration of a table.

    `key` names its file (`table`, `layers`, …). `rows` is a function of the measurements, `columns`
    and `notes` may be constant. Empty columns are left out. `head` is the title of the row labels.
    """

    key: str
    title: str
    rows: Callable[[View], Sequence[Row]]
    columns: tuple[Column, ...] | Callable[[View], Sequence[Column]]
    intro: str = ""
    notes: tuple[str, ...] | Callable[[View], Sequence[str]] = ()
    head: str = "score"
    main: tuple[str, ...] = ()

    def fill(self, view: View) -> FilledTable:
        """Fill the table with measurements, and explain why values have no interval."""
        rows = tuple(self.rows(view))
        columns = [Column("row", self.head, plain=lambda view, row: Cell(row.label))]
        columns += self.columns(view) if callable(self.columns) else self.columns
        filled = [(column, [column.cell(view, row) for row in rows]) for column in columns]
        nonempty = [(c, cells) for c, cells in filled if any(cell != EMPTY_CELL for cell in cells)]
        metrics = [cells for column, cells in nonempty if column.metric and column.interval]
        estimates = [cell.estimate for cells in metrics for cell in cells if cell.estimate]
        with_interval = [e.low is not None and not e.of_few_units for e in estimates]
        intro, notes = self.intro, self.notes(view) if callable(self.notes) else self.notes
        if estimates and not any(with_interval):
            intro += " There are no intervals: too few documents, windows or seeds were measured."
        elif not all(with_interval):
            intro += (
                " A value without brackets was measured too few times, or is the same everywhere."
            )
        return FilledTable(
            *(self.key, self.title, intro.strip()),
            notes=tuple(notes),
            columns=tuple(column for column, _ in nonempty),
            rows=rows,
            cells=tuple(zip(*(cells for _, cells in nonempty), strict=True)),
            main=self.main,
        )


def format_estimate(
    value: Estimate | None, digits: int = 1, signed: bool = False, interval: bool = True
) -> str:
    """Format an estimate as "36.7 [35.9, 37.5]", or a dash where nothing was measured.

    A value of too few units, or one that is equal in all units, has no interval.
    """
    if value is None:
        return "–"
    # "z": a negative number that rounds to 0 is shown without a sign.
    form = f"{'+' if signed else ''}z,.{digits}f"
    if not interval or value.low is None or value.low == value.high or value.of_few_units:
        return f"{value.value:{form}}"
    return f"{value.value:{form}} [{value.low:{form}}, {value.high:{form}}]"


def format_range(counts: Sequence[int]) -> str:
    """Format ascending counts as "49 to 1,024", or as one number if they are equal."""
    first, last = f"{counts[0]:,}", f"{counts[-1]:,}"
    return first if first == last else f"{first} to {last}"


def markdown_table(
    head: Sequence[str], lines: Iterable[Sequence[str]], left: Sequence[int] = (0,)
) -> str:
    """A padded Markdown table; the columns `left` are left-aligned, the others right-aligned."""
    escaped = [
        [text.replace("|", "\\|").replace("\n", " ") for text in line] for line in (head, *lines)
    ]
    widths = [max(map(len, column)) for column in zip(*escaped, strict=True)]
    sides = ["<" if index in left else ">" for index in range(len(head))]
    rule = ["-" * (w - (s == ">")) + ":" * (s == ">") for w, s in zip(widths, sides, strict=True)]
    padded = [
        [f"{text:{side}{width}}" for text, side, width in zip(line, sides, widths, strict=True)]
        for line in escaped
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in (padded[0], rule, *padded[1:]))


def describe_seeds(frame: pl.DataFrame) -> str:
    """The seeds of each row: "0, 1, 2 of Baseline, KNA; 0 of CosA".

    A training without evaluation counts if it diverged, or if its whole row has no evaluation.
    """
    is_evaluated = (pl.col("protocol") != "training") | (pl.col("statistic") == "diverged")
    evaluated = frame.filter(is_evaluated)
    groups: dict[tuple[int, ...], list[str]] = {}
    for row in sorted(frame["row"].unique().to_list()):
        of_row = evaluated.filter(row=row)
        seeds = (of_row if of_row.height else frame.filter(row=row))["seed"].unique().to_list()
        groups.setdefault(tuple(sorted(seeds)), []).append(row)
    line = "; ".join(f"{', '.join(map(str, s))} of {', '.join(rows)}" for s, rows in groups.items())
    few = any(len(seeds) < FEW_SEEDS for seeds in groups)
    warning = f". A row of fewer than {FEW_SEEDS} seeds describes those models, not the score"
    return line + warning * few


def factor_label(column: str) -> str:
    """The label of a factor's column: "warm up" for "factor.warm_up"."""
    return column.removeprefix(FACTOR).replace("_", " ")
