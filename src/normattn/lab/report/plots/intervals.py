"""Values with their intervals: rows below each other, quantities side by side."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from normattn.lab.report.figure import IntervalColumn, Intervals
from normattn.lab.report.palette import LINES
from normattn.lab.report.plots import style

_WIDTH, _WIDE, _ROW = 1.75, 2.6, 0.22  # inches: a quantity's axes, one of few, and a row of them
_COLOUR = LINES[2]


def plot(figure: Intervals) -> Figure:
    """One axes for every quantity; only the first names the rows."""
    columns = len(figure.columns)
    size = _WIDE if columns <= 2 else _WIDTH
    names = style.inches([*figure.rows]) + 0.15
    height = _ROW * len(figure.rows) + 0.1
    titles = [style.wrapped(column.title, size) for column in figure.columns]
    lines = max(title.count("\n") + 1 for title in titles)
    # The first axes stands right of the rows' names, so all are placed as if they were.
    drawn, axes = style.axes(
        figure.title,
        1,
        1,
        (columns * (size + 0.2) - 0.2, height),
        left=names,
        above=0.1 + 0.17 * lines,
        below=0.35,
    )
    whole = axes[0].get_position()
    axes[0].remove()
    unit = whole.width / (columns * (size + 0.2) - 0.2)
    for index, (column, title) in enumerate(zip(figure.columns, titles, strict=True)):
        x = whole.x0 + index * (size + 0.2) * unit
        axis = drawn.add_axes((x, whole.y0, size * unit, whole.height))
        _column(axis, column, title)
        axis.set_ylim(len(figure.rows) - 0.5, -0.5)
        axis.set_yticks(range(len(figure.rows)), figure.rows if index == 0 else [])
        axis.tick_params(axis="y", length=0)
    if figure.symlog is not None:
        _share(drawn.axes, figure.symlog)
    return drawn


def _share(axes: Sequence[Axes], linear: float) -> None:
    """One axis for all, linear within ± `linear`."""
    for axis in axes:
        # The linear part is as wide as a decade, as on the page.
        axis.set_xscale("symlog", linthresh=linear, linscale=0.9)
        axis.xaxis.set_major_formatter("{x:g}")
    ends = [axis.get_xlim() for axis in axes]
    for axis in axes:
        axis.set_xlim(min(low for low, _ in ends), max(high for _, high in ends))


def _column(axis: Axes, column: IntervalColumn, title: str) -> None:
    axis.set_title(title, fontsize=8.5)
    axis.spines["left"].set_visible(False)
    axis.xaxis.set_major_locator(MaxNLocator(4))
    axis.tick_params(axis="x", labelsize=8)
    if column.zero:
        axis.axvline(0, color="#404040", linewidth=1)
    for row, estimate in enumerate(column.values):
        if estimate is None:
            continue
        if estimate.low is not None and estimate.high is not None:
            axis.hlines(row, estimate.low, estimate.high, color=_COLOUR, linewidth=2, alpha=0.55)
        hollow = estimate.low is None
        axis.plot(
            *([estimate.value], [row], "o"),
            color=_COLOUR,
            markersize=4.5,
            markerfacecolor="white" if hollow else _COLOUR,
        )
