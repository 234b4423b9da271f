"""Tables as values: rows and columns declared as data, filled from the frame."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from normattn.lab.report.view import Bins, Term, View
from normattn.lab.stats import Estimate, Statistic
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
    """One quantity of every row: Σ factor · statistic where the row is and the term says.

    `terms` overlay the row's own place, so ((1, {}), (−1, {"row": "PostLN"})) is a difference to
    PostLN. `interval` False shows the value alone, as for a number of parameters. `plain` makes
    the text from the view instead, for what is no contrast.
    """

    key: str
    title: str
    statistic: Statistic | None = None
    terms: tuple[tuple[float, Where], ...] = ((1.0, {}),)
    bins: Bins | None = None
    interval: bool = True
    signed: bool = False
    plain: Callable[[View, Row], Cell] | None = None

    def cell(self, view: View, row: Row) -> Cell:
        """This column of a row."""
        if self.plain is not None:
            return self.plain(view, row)
        assert self.statistic is not None
        terms = [Term(f, {**row.where, **extra}, self.bins) for f, extra in self.terms]
        if len(terms) > 1 and all(term.where == terms[0].where for term in terms[1:]):
            return NOTHING  # a row's difference to itself
        estimate = view.contrast(self.statistic, terms)
        if estimate is None or not math.isfinite(estimate.value):
            return NOTHING  # not measured, or nothing was counted
        return Cell(shown(estimate, self.statistic.digits, self.signed, self.interval), estimate)


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
