"""Small multiples: one panel per method, all on the same axes, lines named at their ends."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import wrap

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from normattn.reports.curves import Curve, Point
from normattn.reports.figures.style import (
    REFERENCE,
    house_style,
    label_ends,
    label_width,
    line_style,
    method_title,
    paged_stem,
    save,
    variant_pages,
)

_WIDTH, _HEIGHT = 2.9, 3.5  # inches: the axes of a panel, and a panel with its titles
_LEFT, _GAP = 0.62, 0.22  # inches: left of the first panel, and between labels and a panel


def draw_panels(
    curves: Sequence[Curve],
    folder: Path,
    stem: str,
    title: str,
    caption: str,
    x_of: Callable[[Point], float],
    x_label: str,
    log_x: bool,
) -> list[Path]:
    """Save `panels` as `stem`; more than 8 variants go on in `stem_2` and so on."""
    paths = []
    for page, names in enumerate(variant_pages([curve.variant for curve in curves])):
        own = [name for name in names if page == 0 or name != REFERENCE]
        methods = {curve.method for curve in curves if curve.variant in own}
        shown = [c for c in curves if c.variant in names and c.method in methods]
        with house_style():
            figure = panels(shown, title, caption, x_of, x_label, log_x)
            paths += save(figure, folder, paged_stem(stem, page))
    return paths


def panels(
    curves: Sequence[Curve],
    title: str,
    caption: str,
    x_of: Callable[[Point], float],
    x_label: str,
    log_x: bool,
) -> Figure:
    """One panel per method with a line per variant and its shaded interval.

    `x_of` places a point; `caption` stands under the panels. The vertical line of a panel is
    the training length.
    """
    methods = list(dict.fromkeys(curve.method for curve in curves))
    columns = min(2, len(methods))
    lines = math.ceil(len(methods) / columns)
    beside = label_width([curve.variant for curve in curves])
    width = _LEFT + columns * (_WIDTH + beside) + (columns - 1) * _GAP
    heading, notes = wrap(title, round(10 * width)), wrap(caption, round(16 * width))
    top, bottom = 0.5 + 0.22 * len(heading), 0.72 + 0.14 * len(notes)
    size = (width, _HEIGHT * lines + top + bottom)
    figure = Figure(figsize=size, dpi=150)
    axes = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False)
    figure.subplots_adjust(
        left=_LEFT / size[0],
        right=1 - beside / size[0],
        top=1 - top / size[1],
        bottom=bottom / size[1],
        wspace=(beside + _GAP) / _WIDTH,
        hspace=0.26,
    )
    low, high = _limits(curves)
    for index, axis in enumerate(axes.flat):
        if index >= len(methods):
            axis.set_visible(False)
            continue
        axis.set_ylim(low, high)
        shown = [curve for curve in curves if curve.method == methods[index]]
        _panel(axis, shown, curves, x_of, log_x)
        axis.set_title(method_title(methods[index]), loc="left", fontweight="bold")
        axis.tick_params(labelbottom=True, labelleft=True)
        if index % columns == 0:
            axis.set_ylabel("next-token accuracy (%)")
        if index >= len(methods) - columns:
            axis.set_xlabel(x_label)
    left = 0.2 / size[0]
    figure.text(
        *(left, 1 - 0.15 / size[1], "\n".join(heading)), fontsize=11, fontweight="bold", va="top"
    )
    figure.text(
        *(left, 0.1 / size[1], "\n".join(notes)), fontsize=7.5, color="#404040", va="bottom"
    )
    return figure


def _panel(
    axis: Axes,
    shown: Sequence[Curve],
    curves: Sequence[Curve],
    x_of: Callable[[Point], float],
    log_x: bool,
) -> None:
    variants = [curve.variant for curve in curves]
    ends, colours = [], []
    for curve in shown:
        style = line_style(curve.variant, variants)
        x = [x_of(point) for point in curve.points]
        y = [point.value for point in curve.points]
        lower = [point.value if point.low is None else point.low for point in curve.points]
        upper = [point.value if point.high is None else point.high for point in curve.points]
        axis.fill_between(x, lower, upper, color=style["color"], alpha=0.10, linewidth=0)
        axis.plot(x, y, **style, markevery=max(1, len(x) // 8))
        ends.append((curve.variant, x[-1], y[-1]))
        colours.append(style["color"])
    if log_x:
        lengths = {curve.train_length for curve in shown}
        unit = lengths.pop() if len(lengths) == 1 else 0
        places = sorted({x_of(point) for curve in shown for point in curve.points})
        many = len(places) > 8 and unit > 0
        log_axis(axis, octaves(unit, places[0], places[-1]) if many else places, unit)
    for length in sorted({curve.train_length for curve in shown}):
        axis.axvline(length, color="#707070", linewidth=1, linestyle=":")
        axis.annotate(
            f"training length {length}",
            xy=(length, 0.015),
            xycoords=axis.get_xaxis_transform(),
            xytext=(3, 0),
            textcoords="offset points",
            fontsize=7,
            color="#505050",
        )
    low, high = map(float, axis.get_ylim())
    label_ends(axis, ends, colours, (high - low) * 0.052)


def octaves(unit: int, first: float, last: float, least: int = -2) -> list[float]:
    """L·2^k from `first` to `last` (and a little more), k at least `least`."""
    return [unit * 2.0**k for k in range(least, 24) if first <= unit * 2.0**k <= last * 1.1]


def log_axis(axis: Axes, ticks: Sequence[float], unit: int) -> None:
    """A logarithmic axis with a tick at each of `ticks`.

    `unit` is the training length L, in which each tick is told a second time; 0 for none.
    """
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks)
    axis.xaxis.set_minor_locator(NullLocator())

    def name(value: float, _: int | None = None) -> str:
        if not unit:
            return f"{value:g}"
        multiple = f"1/{unit / value:g}" if value < unit else f"{value / unit:g}"
        return f"{value:g}\n{multiple}×"

    axis.xaxis.set_major_formatter(FuncFormatter(name))
    axis.margins(x=0.06)


def _limits(curves: Sequence[Curve]) -> tuple[float, float]:
    """Limits that hold every line; of a long curve's intervals only those from the third bin on.

    The first bins of a position curve hold little context and wide intervals, which would flatten
    the rest.
    """
    lows = [p.value for curve in curves for p in curve.points]
    highs = list(lows)
    for curve in curves:
        for point in curve.points[2 if len(curve.points) > 8 else 0 :]:
            lows.append(point.value if point.low is None else point.low)
            highs.append(point.value if point.high is None else point.high)
    low, high = min(lows), max(highs)
    pad = max(0.06 * (high - low), 0.5)
    return max(-1.0, low - pad), min(101.0, high + pad)
