"""Figures as values: the numbers of a picture and their titles, before anything is drawn.

Three kinds are enough for every report: `Curves` (lines with bands), `Intervals` (a value and its
interval for every row) and `Grid` (coloured cells with a number). `charts` draws each, for
report.html and as an image.
"""

from __future__ import annotations

from dataclasses import dataclass

from normattn.lab.stats import Estimate


@dataclass(frozen=True)
class Point:
    """One value at x with its interval (None: none)."""

    x: float
    value: float
    low: float | None = None
    high: float | None = None

    @classmethod
    def of(cls, x: float, estimate: Estimate) -> Point:
        """An estimate at x."""
        return cls(x, estimate.value, estimate.low, estimate.high)


@dataclass(frozen=True)
class Line:
    """A line of a panel; lines of one `family` share a colour, and `dashed` distinguishes them."""

    label: str
    points: tuple[Point, ...]
    family: str = ""
    dashed: bool = False


@dataclass(frozen=True)
class Panel:
    """Axes with lines, and a vertical rule at the training length L where x counts tokens."""

    title: str
    lines: tuple[Line, ...]
    x_title: str
    y_title: str
    log_x: bool = False
    log_y: bool = False
    train_length: int | None = None


@dataclass(frozen=True)
class Curves:
    """Panels of lines, side by side or below each other; lines of one label toggle together.

    `first`: families that have the first colours, shown or not, so that each has its own in every
    figure that names the same.
    """

    name: str
    title: str
    panels: tuple[Panel, ...]
    shared_y: bool = True
    first: tuple[str, ...] = ()


@dataclass(frozen=True)
class IntervalColumn:
    """One quantity of every row; None where a row has none."""

    title: str
    values: tuple[Estimate | None, ...]
    zero: bool = False


@dataclass(frozen=True)
class Intervals:
    """Values with their intervals: rows below each other, quantities side by side.

    `symlog`: the columns are of one kind and share an axis, linear within ± this, logarithmic
    beyond; None: each has a linear axis of its own.
    """

    name: str
    title: str
    rows: tuple[str, ...]
    columns: tuple[IntervalColumn, ...]
    symlog: float | None = None


@dataclass(frozen=True)
class Grid:
    """Coloured cells: values (rows, columns), None where there is none; `texts` are written in."""

    name: str
    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: tuple[tuple[float | None, ...], ...]
    texts: tuple[tuple[str, ...], ...]
    x_title: str = ""
    y_title: str = ""
    scale_title: str = ""


Figure = Curves | Intervals | Grid


def is_empty(figure: Figure) -> bool:
    """Whether there is nothing to draw; a cell of a grid may still say why it has no value."""
    match figure:
        case Curves(panels=panels):
            return not any(line.points for panel in panels for line in panel.lines)
        case Intervals(columns=columns):
            return not any(value for column in columns for value in column.values)
        case Grid(values=values, texts=texts):
            return all(v is None for row in values for v in row) and not any(map(any, texts))
