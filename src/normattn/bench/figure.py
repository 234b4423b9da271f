"""A figure for each suite: every goal as a dot beside its limit, on a log axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from normattn.atomic import write_bytes
from normattn.bench.judge import Verdict
from normattn.bench.table import pair
from normattn.report.plots.style import house_style, rendered

_LINE, _TOP, _BOTTOM, _LABEL, _PLOT = 0.19, 0.5, 0.75, 5.0, 4.2  # inches
_COLOURS = {True: "#0072B2", False: "#D55E00", None: "#7F7F7F"}
_TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)


def draw(suites: Mapping[str, Sequence[dict[str, Any]]], folder: Path) -> list[Path]:
    """Write SUITE.png and SUITE.svg into `folder`: ours / peer of every goal with its interval."""
    with house_style():
        return [path for name, rows in suites.items() for path in _suite(name, rows, folder)]


def _suite(name: str, rows: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    cases = [(str(row["case"]), [Verdict.read(goal) for goal in row["goals"]]) for row in rows]
    lines = sum(1 + len(verdicts) for _, verdicts in cases)
    width, height = _LABEL + _PLOT + 0.3, _TOP + _LINE * lines + _BOTTOM
    figure = Figure(figsize=(width, height), dpi=150)
    box = (_LABEL / width, _BOTTOM / height, _PLOT / width, 1 - (_TOP + _BOTTOM) / height)
    _fill(figure.add_axes(box), cases)
    caption = (
        "Bars are 95 % intervals over the rounds of one interleaved run; the upright stroke is the "
        "goal. Blue: met within 5 %; orange: missed; grey: no goal."
    )
    title = f"{name}: time and peak memory beside the peers"
    left = 0.15 / width
    figure.text(left, 1 - 0.13 / height, title, fontsize=11, fontweight="bold", va="top")
    figure.text(left, 0.1 / height, caption, fontsize=7.5, color="#404040", va="bottom")
    paths = [folder / f"{name.replace('-', '_')}.{form}" for form in ("png", "svg")]
    for path in paths:
        write_bytes(path, rendered(figure, path.suffix[1:]))
    return paths


def _fill(axis: Axes, cases: Sequence[tuple[str, Sequence[Verdict]]]) -> None:
    """A heading per case, a line per goal, from top to bottom."""
    heights, labels, place = [], [], 0.0
    for name, verdicts in cases:
        _heading(axis, place, name)
        for verdict in verdicts:
            place += 1
            _dot(axis, place, verdict)
            heights.append(place)
            labels.append(pair(verdict))
        place += 1
    axis.set_xscale("log")
    _frame(axis, heights, labels, place)


def _heading(axis: Axes, place: float, text: str) -> None:
    axis.text(
        0.0,
        place,
        f"{text}  ",
        transform=axis.get_yaxis_transform(),
        ha="right",
        va="center",
        fontsize=8,
        fontweight="bold",
    )


def _dot(axis: Axes, place: float, verdict: Verdict) -> None:
    colour, ratio = _COLOURS[verdict.met], verdict.ratio
    axis.plot((ratio.low, ratio.high), (place, place), color=colour, linewidth=1.2)
    axis.plot(ratio.value, place, "o", color=colour, markersize=3.5)
    if verdict.limit is not None:
        ends = (place - 0.4, place + 0.4)
        axis.plot((verdict.limit,) * 2, ends, color="black", linewidth=1.2)


def _frame(axis: Axes, heights: Sequence[float], labels: Sequence[str], end: float) -> None:
    axis.axvline(1.0, color="#BDBDBD", linewidth=0.8, zorder=0)
    axis.set_ylim(end - 0.3, -0.7)
    axis.set_yticks(heights)
    axis.set_yticklabels(labels, fontsize=7)
    axis.tick_params(axis="y", length=0)
    axis.grid(False, axis="y")
    low, high = axis.get_xlim()
    low, high = min(low, 0.8), max(high, 1.25)
    axis.set_xlim(low, high)
    axis.set_xticks([tick for tick in _TICKS if low <= tick <= high])
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.set_xlabel("ours / peer (log; to the left ours is faster or smaller)", fontsize=8)
