"""Tables as values: rows and columns declared as data, filled from the frame."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from normattn.lab.report.view import View
from normattn.lab.stats import Estimate, Metric
from normattn.lab.stats.arrays import Where


@dataclass(frozen=True)
class Cell:
    """What stands in one place of a table: the text, and the number it is made of, if any."""

    text: str
    estimate: Estimate | None = None

    @property
    def sort_value(self) -> float | None:
        """What the column is sorted by."""
        return None if self.estimate is None else self.estimate.value


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
    its place stands before what the row says. `interval` False shows the value alone, as for a
    number of parameters. `plain` makes the cell from the view instead, for what is no metric;
    `without` stands where nothing was counted.
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


def shown_cell(estimate: Estimate, metric: Metric, interval: bool = True) -> Cell:
    """A metric's value with its digits, and a sign if it is a difference."""
    return Cell(shown(estimate, metric.digits, metric.is_difference, interval), estimate)


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


@dataclass(frozen=True)
class Table:
    """A table: `rows` are found in the frame, `columns` that no row fills are left out.

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
        """The table made from a frame."""
        rows = tuple(self.rows(view))
        columns = self.columns(view) if callable(self.columns) else self.columns
        cells = [[column.cell(view, row) for column in columns] for row in rows]
        kept = [
            index
            for index in range(len(columns))
            if any(line[index] is not NOTHING for line in cells)
        ]
        notes = self.notes(view) if callable(self.notes) else self.notes
        first = Column("row", self.head, plain=lambda view, row: Cell(row.label))
        return Filled(
            self.key,
            self.title,
            self.intro,
            tuple(notes),
            (first, *(columns[index] for index in kept)),
            rows,
            tuple(
                (Cell(row.label), *(line[index] for index in kept))
                for row, line in zip(rows, cells, strict=True)
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
