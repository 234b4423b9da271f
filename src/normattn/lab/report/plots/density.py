"""Distributions below each other, one or two versions of each in one place."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from normattn.lab.report.figure import Density, DensityRow
from normattn.lab.report.palette import LINES
from normattn.lab.report.plots import style

_WIDTH, _ROW = 4.2, 0.5  # inches


def plot(figure: Density) -> Figure:
    """A row of bins for every distribution, all on one x axis."""
    names = style.inches([row.label for row in figure.rows]) + 0.2
    height = _ROW * len(figure.rows)
    drawn, axes = style.axes(
        figure.title, 1, 1, (_WIDTH, height), left=names, beside=0.3, above=0.3
    )
    axis = axes[0]
    for index, row in enumerate(figure.rows):
        _row(axis, row, len(figure.rows) - 1 - index)
    axis.set_ylim(0, len(figure.rows))
    axis.set_xlim(min(row.low for row in figure.rows), max(row.high for row in figure.rows))
    axis.set_yticks(
        [len(figure.rows) - 1 - index + 0.3 for index in range(len(figure.rows))],
        [row.label for row in figure.rows],
    )
    axis.tick_params(axis="y", length=0)
    axis.spines["left"].set_visible(False)
    axis.grid(axis="y", visible=False)
    axis.set_xlabel(figure.x_title)
    handles, labels = axis.get_legend_handles_labels()
    if any(labels):
        axis.legend(
            *(handles, labels),
            loc="lower right",
            bbox_to_anchor=(1.0, 1.0),
            ncols=len(labels),
            frameon=False,
            fontsize=8,
        )
    return drawn


def _row(axis: Axes, row: DensityRow, bottom: int) -> None:
    highest = max((max(heights, default=0.0) for heights in row.heights), default=0.0) or 1.0
    for version, (heights, name) in enumerate(zip(row.heights, row.names, strict=True)):
        edges = np.linspace(row.low, row.high, len(heights) + 1)
        tops = bottom + 0.9 * np.asarray(heights) / highest
        colour = (LINES[2], LINES[4])[version % 2]
        axis.stairs(tops, edges, baseline=bottom, fill=True, color=colour, alpha=0.18, linewidth=0)
        axis.stairs(
            *(tops, edges),
            baseline=None,
            color=colour,
            linewidth=1.2,
            linestyle="-" if version == 0 else (0, (3, 1.2)),
            label=name if bottom == 0 else None,
        )
    axis.axhline(bottom, color="#B0B0B0", linewidth=0.6)
