"""Reading on: accuracy and loss against position on a logarithmic axis, every method a line."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from normattn.reports.cells import method_labels
from normattn.reports.curves import Point
from normattn.reports.figures.panels import log_axis, octaves
from normattn.reports.figures.style import file_stem, house_style, label_ends, save, write_around
from normattn.reports.reading import Reading

# Colours that can be told apart side by side; the model as it is is black.
_COLOURS = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D31"),
    *("#882255", "#7F7F7F", "#44AA99", "#332288", "#999933", "#AA4466", "#117733"),
)
_MARKERS = "osD^vPX<>hp*d"
_LOGN = "logn†"
_SHOWN_FROM = 1 / 16  # training lengths: before, there is next to no context and much noise
_WIDTH, _HEIGHT = 5.0, 4.4  # inches: a panel with its labels


def draw_readings(
    curves: Sequence[Reading], folder: Path, subject: str = "Natural held-out text"
) -> list[Path]:
    """Draw `reading_by_position_<variant>` for every trained variant in `curves`.

    Where they were trained at several lengths, the length joins the name. `subject` is what was
    read, as the caption says it.
    """
    paths = []
    several = len({each.row.train_length for each in curves}) > 1
    for row in dict.fromkeys((each.row.variant, each.row.train_length) for each in curves):
        variant, length = row
        shown = [each for each in curves if (each.row.variant, each.row.train_length) == row]
        stem = file_stem("reading_by_position", variant, *[str(length)] * several)
        with house_style():
            paths += save(_figure(shown, variant, subject), folder, stem)
    return paths


def method_style(method: str, methods: Sequence[str]) -> dict[str, Any]:
    """Colour and marker by method, black for none; dashes and hollow markers with log-n."""
    base = _without_logn(method)
    others = [b for b in dict.fromkeys(map(_without_logn, methods)) if b]
    place = others.index(base) if base else 0
    colour = _COLOURS[place % len(_COLOURS)] if base else "#000000"
    logn = method != base
    return {
        "color": colour,
        "linestyle": (0, (4, 1.8)) if logn else "-",
        "linewidth": 1.3,
        "marker": _MARKERS[place % len(_MARKERS)] if base else "o",
        "markersize": 3.2,
        "markerfacecolor": "white" if logn else colour,
        "markeredgecolor": colour,
    }


def _figure(curves: Sequence[Reading], variant: str, subject: str) -> Figure:
    size = (2 * _WIDTH + 0.2, _HEIGHT + 1.25)
    figure = Figure(figsize=size, dpi=150)
    axes = figure.subplots(1, 2, sharex=True)
    figure.subplots_adjust(
        left=0.6 / size[0],
        right=1 - 1.25 / size[0],
        top=1 - 0.5 / size[1],
        bottom=1.18 / size[1],
        wspace=0.55,
    )
    _panel(axes[0], curves, "accuracy", "next-token accuracy (%)")
    _panel(axes[1], curves, "loss", "loss (nats per token)")
    caption = (
        f"{subject}, the same documents at every position. Each point: the tokens of "
        "its stretch of positions. Shaded: 95 % bootstrap interval over documents (and seeds, "
        "where several). Dashed, hollow: with post-hoc log-n. Right of the dotted line the text is "
        "longer than any seen in training."
    )
    heading = [f"Reading on past the training length: {variant}"]
    write_around(figure, size, heading, wrap(caption, round(16 * size[0])))
    return figure


def _panel(axis: Axes, curves: Sequence[Reading], kind: str, label: str) -> None:
    labels = method_labels(each.row for each in curves)
    methods = list(labels.values())
    ends, colours, xs = [], [], set()
    unit = curves[0].row.train_length
    lines = [_shown(getattr(each, kind), unit) for each in curves]
    axis.set_ylim(*_limits(lines))
    for each, points in zip(curves, lines, strict=True):
        style = method_style(labels[each.row], methods)
        x = [math.sqrt(point.first * point.last) for point in points]
        y = [point.value for point in points]
        low = [point.value if point.low is None else point.low for point in points]
        high = [point.value if point.high is None else point.high for point in points]
        alpha = 0.10 if len(curves) < 6 else 0.05
        axis.fill_between(x, low, high, color=style["color"], alpha=alpha, linewidth=0)
        axis.plot(x, y, **style, markevery=max(1, len(x) // 10))
        ends.append((labels[each.row] or "as trained", x[-1], y[-1]))
        colours.append(style["color"])
        xs |= {float(point.last) for point in points}
    log_axis(axis, octaves(unit, min(xs), max(xs), least=-4), unit)
    axis.tick_params(labelsize=7.5)
    axis.axvline(unit, color="#707070", linewidth=1, linestyle=":")
    axis.set_xlabel("position (tokens read so far), and in training lengths")
    axis.set_ylabel(label)
    bottom, top = map(float, axis.get_ylim())
    label_ends(axis, ends, colours, (top - bottom) * 0.042)


def _shown(points: Sequence[Point], train_length: int) -> list[Point]:
    return [point for point in points if point.last > train_length * _SHOWN_FROM]


def _limits(lines: Sequence[Sequence[Point]]) -> tuple[float, float]:
    """Limits that hold every line and interval."""
    points = [point for line in lines for point in line]
    ends = [end for p in points for end in (p.value, p.low, p.high) if end is not None]
    low, high = min(ends), max(ends)
    pad = max(0.04 * (high - low), 0.02)
    return max(0.0, low - pad), high + pad


def _without_logn(method: str) -> str:
    return method.removeprefix(_LOGN).removeprefix("-")
