"""Figures as values, which `charts` draws: `Curves` (lines with bands), `Intervals` and `Grid`."""

from __future__ import annotations

from dataclasses import dataclass

from normattn.lab.stats import Estimate


@dataclass(frozen=True)
class Point:
    """A value at x with its interval, if any."""

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
    """A line of a panel. Lines of one `family` share a colour; `dashed` distinguishes them.

    A `control` is dashed, and always highlighted.
    """

    label: str
    points: tuple[Point, ...]
    family: str = ""
    dashed: bool = False
    control: bool = False


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
    """Panels of lines; lines with one label are highlighted together.

    The families in `first` have the first colours, present or not, so that each has the same colour
    in all figures with the same `first`. Lines labelled as in `featured` are always highlighted.
    """

    name: str
    title: str
    panels: tuple[Panel, ...]
    shared_y: bool = True
    first: tuple[str, ...] = ()
    featured: tuple[str, ...] = ()


@dataclass(frozen=True)
class IntervalColumn:
    """The values of one quantity, None where a row has none; `zero`: draw a line at 0."""

    title: str
    values: tuple[Estimate | None, ...]
    zero: bool = False


@dataclass(frozen=True)
class Intervals:
    """Values with their intervals: rows below each other, columns side by side.

    With `symlog` all columns share an axis, linear within ± `symlog` and logarithmic beyond. None:
    each column has a linear axis.
    """

    name: str
    title: str
    rows: tuple[str, ...]
    columns: tuple[IntervalColumn, ...]
    symlog: float | None = None


@dataclass(frozen=True)
class Grid:
    """Coloured cells: values (rows, columns), None where missing, and the texts shown in them."""

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
    """Whether there is nothing to draw; a text in a grid may explain a missing value."""
    match figure:
        case Curves(panels=panels):
            return not any(line.points for panel in panels for line in panel.lines)
        case Intervals(columns=columns):
            return not any(value for column in columns for value in column.values)
        case Grid(values=values, texts=texts):
            return all(v is None for row in values for v in row) and not any(map(any, texts))
