"""Key norms against the attention received, and cosines at the training length and beyond."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from normattn.reports.figures.style import house_style, save
from normattn.reports.mechanism import QUANTILES, TAIL, MechanismRow
from normattn.reports.mechanism_records import DENSITY
from normattn.reports.metrics import Estimate

_NEAR, _FAR = "#0072B2", "#D55E00"


def draw_mechanism(rows: Sequence[MechanismRow], folder: Path) -> list[Path]:
    """Draw `key_norms_and_attention` and `cosine_ranges`; return the files written."""
    with house_style():
        return [*_norms(rows, folder), *_cosines(rows, folder)]


def _norms(rows: Sequence[MechanismRow], folder: Path) -> list[Path]:
    columns = min(4, len(rows))
    lines = math.ceil(len(rows) / columns)
    size = (2.9 * columns + 0.7, 2.75 * lines + 1.55)
    figure = Figure(figsize=size, dpi=150)
    axes = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False)
    figure.subplots_adjust(
        left=0.65 / size[0],
        right=1 - 0.2 / size[0],
        top=1 - 0.75 / size[1],
        bottom=1.05 / size[1],
        wspace=0.08,
        hspace=0.22,
    )
    for index, axis in enumerate(axes.flat):
        if index >= len(rows):
            axis.set_visible(False)
            continue
        _density(axis, rows[index])
        axis.tick_params(labelbottom=index >= len(rows) - columns)
        if index >= len(rows) - columns:
            axis.set_xlabel("‖k‖ over the text's mean")
        if index % columns == 0:
            axis.set_ylabel("attention received / uniform")
    _words(
        figure,
        "Does a key's norm decide how much attention it receives?",
        "Every key of every text, layer and head; darker: more keys (logarithmic). ρ: rank "
        "correlation within a text, mean over heads, with its 95 % interval.\nThe norm is the one "
        "that the score sees: after KeyNorm, or a norm without gain, all keys have the same.",
    )
    return save(figure, folder, "key_norms_and_attention")


def _density(axis: Axes, row: MechanismRow) -> None:
    x, y = DENSITY
    counts = np.where(row.density > 0, row.density, np.nan)
    axis.pcolormesh(
        2.0**x, 2.0**y, counts.T, cmap="cividis_r", norm=LogNorm(1, max(2.0, row.density.max()))
    )
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    axis.set_xticks([0.5, 1.0, 2.0], ["½", "1", "2"])
    axis.set_yticks([2.0**-4, 0.25, 1.0, 4.0, 16.0], ["1/16", "¼", "1", "4", "16"])
    axis.minorticks_off()
    axis.axhline(1.0, color="#707070", linewidth=0.8, linestyle=":")
    axis.set_title(row.variant, loc="left", fontweight="bold")
    found = row.correlation
    said = "all keys have one norm" if found is None else f"ρ = {_interval(found)}"
    axis.text(0.03, 0.97, said, transform=axis.transAxes, va="top", fontsize=7.5)


def _cosines(rows: Sequence[MechanismRow], folder: Path) -> list[Path]:
    size = (8.8, 0.62 * len(rows) + 2.0)
    figure = Figure(figsize=size, dpi=150)
    axis = figure.add_axes((2.05 / size[0], 1.15 / size[1], 1 - 3.5 / size[0], 1 - 1.9 / size[1]))
    for line, row in enumerate(rows):
        _range(axis, line - 0.17, row.near, row.near_ends, _NEAR)
        _range(axis, line + 0.17, row.far, row.far_ends, _FAR)
        axis.text(
            1.03,
            line,
            f"{row.outside.value:.1f} % outside\n[{_end(row.outside.low)}, "
            f"{_end(row.outside.high)}]",
            transform=axis.get_yaxis_transform(),
            va="center",
            fontsize=7.5,
            color=_FAR,
        )
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.set_xlim(-1.02, 1.02)
    axis.set_yticks(range(len(rows)), [row.variant for row in rows])
    axis.grid(visible=False, axis="y")
    axis.set_xlabel("cos(q, k), as the score has them")
    near, far = rows[0].train_length, rows[0].length
    for place, colour, length in ((0.0, _NEAR, near), (0.3, _FAR, far)):
        axis.text(
            place, 1.02, f"— {length} tokens", transform=axis.transAxes, color=colour, fontsize=8.5
        )
    _words(
        figure,
        "Do cosines leave the range that training has seen?",
        f"Thick: the middle half; thin: from the {TAIL:.1%} to the {1 - TAIL:.1%} quantile, mean "
        "over heads, with 95 % intervals at its ends; dots: the extremes of all heads.\n"
        f"Outside: pairs at {far} tokens beyond that range of their own head at {near} tokens, "
        f"where it holds all but {2 * TAIL:.1%}.",
    )
    return save(figure, folder, "cosine_ranges")


def _range(
    axis: Axes,
    height: float,
    quantiles: Sequence[Estimate],
    ends: tuple[float, float],
    colour: str,
) -> None:
    low, first, middle, third, high = (quantiles[i] for i in range(len(QUANTILES)))
    axis.plot([low.value, high.value], [height, height], color=colour, linewidth=1.2)
    axis.plot(
        [first.value, third.value], [height] * 2, color=colour, linewidth=5, solid_capstyle="butt"
    )
    axis.plot([middle.value], [height], marker="|", color="white", markersize=5)
    for end in (low, high):
        if end.low is not None and end.high is not None:
            box = [end.low, end.high]
            axis.fill_between(box, height - 0.09, height + 0.09, color=colour, alpha=0.35, lw=0.8)
    axis.plot(ends, [height, height], ".", color=colour, markersize=3)


def _words(figure: Figure, title: str, notes: str) -> None:
    width, height = figure.get_size_inches()
    left = 0.2 / width
    figure.text(left, 1 - 0.15 / height, title, fontsize=11, fontweight="bold", va="top")
    figure.text(left, 0.1 / height, notes, fontsize=7.5, color="#404040", va="bottom")


def _interval(value: Estimate) -> str:
    return f"{value.value:.2f} [{_end(value.low)}, {_end(value.high)}]"


def _end(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
