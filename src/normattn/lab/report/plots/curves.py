"""Panels of lines with their intervals as bands, each line named at its end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from normattn.lab.report.figure import Curves, Line, Panel, Point
from normattn.lab.report.palette import LINES, line_colour, ranked
from normattn.lab.report.plots import style
from normattn.lab.report.plots.labels import spread

_WIDTH, _HEIGHT = 2.9, 2.75  # inches of a panel's axes
_LABEL = 0.15  # inches from label to label
_MARKERS = "o^sDvPX<>hp*"
_WIDE = 5  # times the middle interval's width: wider ones do not set the axis
_LONG = 8  # points beyond which a line is drawn with some of its markers only


def plot(figure: Curves) -> Figure:
    """The panels side by side, up to three in a row, all with one y axis where it is shared."""
    panels = [panel for panel in figure.panels if any(line.points for line in panel.lines)]
    most = max(len(panel.lines) for panel in panels)
    columns = {1: 1, 2: 2, 4: 2}.get(len(panels), 3)
    rows = math.ceil(len(panels) / columns)
    beside = max(0.9, 0.35 + style.inches([line.label for p in panels for line in p.lines]))
    height = max(_HEIGHT, _LABEL * most)
    drawn, axes = style.axes(figure.title, rows, columns, (_WIDTH, height), beside=beside)
    families = [line.family or line.label for p in panels for line in p.lines]
    places = ranked(families, figure.first)
    shared = _limits([line for p in panels for line in p.lines], panels[0].log_y)
    for axis, panel in zip(axes, panels, strict=False):
        limits = shared if figure.shared_y else _limits(panel.lines, panel.log_y)
        _panel(axis, panel, places, limits, height)
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    return drawn


def _panel(
    axis: Axes, panel: Panel, places: dict[str, int], limits: tuple[float, float], height: float
) -> None:
    axis.set_title(style.wrapped(panel.title, _WIDTH + 0.5))
    axis.set_xlabel(panel.x_title)
    axis.set_ylabel(style.wrapped(panel.y_title, height))
    if panel.log_y:
        axis.set_yscale("log")
    axis.set_ylim(*limits)
    for line in panel.lines:
        _line(axis, panel, line, places[line.family or line.label])
    at = sorted({point.x for line in panel.lines for point in line.points})
    if panel.log_x:
        _log_x(axis, at)
    elif all(float(x).is_integer() for x in at):  # No half layers.
        axis.xaxis.set_major_locator(MaxNLocator(steps=[1, 2, 2.5, 5, 10], integer=True))
    for mark in panel.marks:
        axis.axvline(mark.x, color="#707070", linewidth=1, linestyle=":")
        axis.annotate(
            mark.label,
            xy=(mark.x, 0.015),
            xycoords=axis.get_xaxis_transform(),
            xytext=(3, 0),
            textcoords="offset points",
            fontsize=7.5,
            color="#505050",
        )
    _name_ends(axis, [line for line in panel.lines if line.points], places, height)


def _line(axis: Axes, panel: Panel, line: Line, position: int) -> None:
    colour, marker = LINES[line_colour(position)], _MARKERS[position % len(_MARKERS)]
    x, y = [p.x for p in line.points], [p.value for p in line.points]
    lower = [_low(point) for point in line.points]
    upper = [_high(point) for point in line.points]
    step: dict[str, Any] = {"step": "post"} if panel.steps else {}
    axis.fill_between(x, lower, upper, color=colour, alpha=0.10, linewidth=0, **step)
    axis.plot(
        x,
        y,
        color=colour,
        linestyle=(0, (4, 1.8)) if line.dashed else "-",
        drawstyle="steps-post" if panel.steps else "default",
        marker=None if panel.steps else marker,
        markersize=4,
        markerfacecolor="white" if line.dashed else colour,
        markevery=max(1, len(x) // _LONG),
    )


def _log_x(axis: Axes, places: Sequence[float]) -> None:
    """A tick at each place, or at powers of two where there are many."""
    axis.set_xscale("log", base=2)
    axis.set_xticks(places if len(places) <= 6 else style.octaves(places[0], places[-1], 6))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: style.number(value)))


def _name_ends(axis: Axes, lines: Sequence[Line], places: dict[str, int], height: float) -> None:
    """Write each line's name to the right of the panel, joined to the line's last point."""
    to_axes = axis.transData + axis.transAxes.inverted()
    ends = [float(to_axes.transform((p.x, p.value))[1]) for p in (_last(line) for line in lines)]
    heights = spread(ends, _LABEL / height, 0.0, 1.0)
    for line, at in zip(lines, heights, strict=True):
        end = _last(line)
        colour = LINES[line_colour(places[line.family or line.label])]
        axis.annotate(
            line.label,
            xy=(end.x, end.value),
            xytext=(1.06, at),
            textcoords=axis.transAxes,
            va="center",
            fontsize=7.5,
            color=colour,
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": colour,
                "linewidth": 0.5,
                "alpha": 0.7,
                "relpos": (0, 0.5),
            },
        )


def _last(line: Line) -> Point:
    """The last point that can be drawn."""
    return next((p for p in reversed(line.points) if math.isfinite(p.value)), line.points[-1])


def _limits(lines: Sequence[Line], log: bool) -> tuple[float, float]:
    """Limits that hold every line and its intervals, but for the widest, which run off the axis.

    Where no value is below 0 intervals that are do not set the axis either. The widest are the
    first two of a long line, as the first bins of a position curve hold little context, and any
    over `_WIDE` times as wide as the middle one, as of two seeds: they would flatten the rest.
    """
    ends = [point.value for line in lines for point in line.points]
    shown = [p for line in lines for p in line.points[2 if len(line.points) > _LONG else 0 :]]
    widths = [_high(point) - _low(point) for point in shown]
    middle = median([width for width in widths if math.isfinite(width)] or [0.0])
    for point, width in zip(shown, widths, strict=True):
        if not width > _WIDE * middle > 0:
            ends += [_low(point), _high(point)]
    known = [end for end in ends if math.isfinite(end) and (end > 0 or not log)] or [1.0]
    low, high = min(known), max(known)
    if log:
        pad = (high / low) ** 0.06 if high > low else 1.5
        return low / pad, high * pad
    if all(point.value >= 0 for line in lines for point in line.points):
        low = max(low, 0.0)
    pad = 0.06 * (high - low) or 0.05 * abs(high) or 0.5
    return low - pad, high + pad


def _low(point: Point) -> float:
    return point.value if point.low is None else point.low


def _high(point: Point) -> float:
    return point.value if point.high is None else point.high
