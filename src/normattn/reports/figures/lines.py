"""Lines with their intervals, one panel per statistic: what the smaller studies draw."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from normattn.reports.figures.style import house_style, label_ends, save
from normattn.reports.metrics import Estimate

COLOURS = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D31")
_WIDTH, _HEIGHT = 4.5, 3.4  # inches: a panel with its labels


@dataclass(frozen=True)
class Line:
    """One line: where its estimates stand on the x axis, and how it looks."""

    name: str
    points: tuple[tuple[float, Estimate], ...]
    colour: str
    dashed: bool = False


@dataclass(frozen=True)
class Level:
    """A horizontal line of reference with its interval as a band."""

    name: str
    estimate: Estimate
    colour: str


@dataclass(frozen=True)
class LinePanel:
    """One statistic: its title, what its y axis shows, its lines and its levels.

    `limits` of the y axis make panels comparable; None for those of the panel's own lines.
    """

    title: str
    y_label: str
    lines: tuple[Line, ...]
    levels: tuple[Level, ...] = ()
    limits: tuple[float, float] | None = None


def draw_lines(
    panels: Sequence[LinePanel],
    folder: Path,
    stem: str,
    *,
    title: str,
    caption: str,
    x_label: str,
    x_ticks: Sequence[tuple[float, str]] | None = None,
    columns: int = 3,
) -> list[Path]:
    """Draw the panels side by side, up to `columns` in a row, as `stem`; return the files."""
    columns = min(columns, len(panels))
    rows = math.ceil(len(panels) / columns)
    width = _WIDTH * columns + 0.3
    heading, notes = wrap(title, round(10 * width)), wrap(caption, round(16 * width))
    top, bottom = 0.5 + 0.22 * len(heading), 0.72 + 0.14 * len(notes)
    size = (width, _HEIGHT * rows + top + bottom)
    with house_style():
        figure = Figure(figsize=size, dpi=150)
        axes = figure.subplots(rows, columns, squeeze=False)
        figure.subplots_adjust(
            left=0.62 / width,
            right=1 - 1.35 / width,
            top=1 - top / size[1],
            bottom=bottom / size[1],
            wspace=0.66,
            hspace=0.32,
        )
        for axis, panel in zip(axes.flat, panels, strict=False):
            _panel(axis, panel)
            axis.set_xlabel(x_label)
            if x_ticks is not None:
                axis.set_xticks([x for x, _ in x_ticks], [name for _, name in x_ticks])
        for axis in list(axes.flat)[len(panels) :]:
            axis.set_visible(False)
        left = 0.2 / width
        figure.text(
            *(left, 1 - 0.15 / size[1], "\n".join(heading)),
            fontsize=11,
            fontweight="bold",
            va="top",
        )
        figure.text(
            *(left, 0.1 / size[1], "\n".join(notes)), fontsize=7.5, color="#404040", va="bottom"
        )
        return save(figure, folder, stem)


def _panel(axis: Axes, panel: LinePanel) -> None:
    ends: list[tuple[str, float, float]] = []
    colours: list[str] = []
    for level in panel.levels:
        low, high = _interval(level.estimate)
        axis.axhspan(low, high, color=level.colour, alpha=0.04, linewidth=0)
        axis.axhline(level.estimate.value, color=level.colour, linewidth=1, linestyle=":")
        ends.append((level.name, math.nan, level.estimate.value))
        colours.append(level.colour)
    places = [place for line in panel.lines for place, _ in line.points]
    step = 0.007 * (max(places) - min(places)) if places else 0.0
    for number, line in enumerate(panel.lines):
        # A little apart, so that intervals at one place can be told apart.
        aside = step * (number - (len(panel.lines) - 1) / 2)
        x = [place + aside for place, _ in line.points]
        y = [estimate.value for _, estimate in line.points]
        ranges = [_interval(estimate) for _, estimate in line.points]
        axis.vlines(x, *zip(*ranges, strict=True), color=line.colour, linewidth=1.0, alpha=0.55)
        axis.plot(
            x,
            y,
            color=line.colour,
            linestyle=(0, (4, 1.8)) if line.dashed else "-",
            marker="o",
            markersize=4,
            markerfacecolor="white" if line.dashed else line.colour,
        )
        ends.append((line.name, x[-1], y[-1]))
        colours.append(line.colour)
    right = float(axis.get_xlim()[1])
    ends = [(name, right if math.isnan(x) else x, y) for name, x, y in ends]
    axis.set_title(panel.title, loc="left", fontweight="bold")
    axis.set_ylabel(panel.y_label)
    if panel.limits is not None:
        axis.set_ylim(*panel.limits)
    bottom, top = map(float, axis.get_ylim())
    label_ends(axis, ends, colours, (top - bottom) * 0.058)


def _interval(estimate: Estimate) -> tuple[float, float]:
    low, high = estimate.low, estimate.high
    return (estimate.value if low is None else low, estimate.value if high is None else high)
