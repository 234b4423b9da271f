"""Coloured cells with what is written in them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Colormap, LinearSegmentedColormap, LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from normattn.lab.report.figure import Grid
from normattn.lab.report.palette import CELLS
from normattn.lab.report.plots import style

_ROW = 0.24  # inches
_SMALL = 0.13  # inches of a cell that nothing is written in
_TURNED = 5  # letters beyond which the names of columns are turned
_APART = 0.24  # inches between the names of columns that are turned
_FLAT = 0.9  # inches of height below which the scale's title is written beside it, level
_BESIDE = 1.6  # inches for such a title


def plot(figure: Grid) -> Figure:
    """The cells, their names left and above, and the scale of the colours at the right."""
    longest = max((len(text) for line in figure.texts for text in line), default=0)
    turned = max(map(len, figure.columns)) > (max(_TURNED, longest) if longest else 1)
    cell = max(0.3, 0.12 + style.LETTER * longest) if longest else _SMALL
    if not turned:
        cell = max(cell, 0.12 + style.inches([*figure.columns]))
    size = (cell * len(figure.columns), (_ROW if longest else _SMALL) * len(figure.rows))
    names = style.inches([*figure.columns]) * 0.75 + 0.15 if turned else 0.3
    flat = size[1] < _FLAT and bool(figure.scale_title)
    scale_room = 1.0 + _BESIDE if flat else 1.0
    drawn, axes = style.axes(
        figure.title,
        1,
        1,
        size,
        left=0.2 + style.inches([*figure.rows]) + (0.25 if figure.y_title else 0),
        beside=max(scale_room, names + 0.25) if turned else scale_room,
        above=names + (0.2 if figure.x_title else 0.0),
        below=0.15,
    )
    axis = axes[0]
    colours = LinearSegmentedColormap.from_list("cells", CELLS)
    norm = _norm(figure)
    (_cells if longest else _mesh)(axis, figure, colours, norm)
    axis.set_xlim(0, len(figure.columns))
    axis.set_ylim(len(figure.rows), 0)
    axis.set_yticks(np.arange(len(figure.rows)) + 0.5, figure.rows, fontsize=8)
    axis.xaxis.tick_top()
    # The stubs know set_xticks's own parameters, not those of the texts that it passes on.
    turned_by: Any = {"rotation": 45, "ha": "left", "rotation_mode": "anchor"} if turned else {}
    every = max(1, math.ceil(_APART / cell)) if turned else 1
    axis.set_xticks(
        np.arange(len(figure.columns))[::every] + 0.5,
        figure.columns[::every],
        fontsize=8,
        **turned_by,
    )
    axis.tick_params(length=0)
    axis.set_xlabel(figure.x_title)
    axis.xaxis.set_label_position("top")
    axis.set_ylabel(figure.y_title)
    axis.grid(False)
    for side in axis.spines.values():
        side.set_visible(False)
    if norm is not None:
        box = axis.get_position()
        wide, high = drawn.get_size_inches()
        bar = drawn.add_axes(
            (box.x1 + 0.15 / wide, box.y0, 0.12 / wide, min(box.height, 2.5 / high))
        )
        scale = drawn.colorbar(ScalarMappable(norm, colours), cax=bar)
        scale.formatter = FuncFormatter(lambda value, _: style.number(value))
        scale.minorformatter = NullFormatter()
        title = style.wrapped(figure.scale_title, _BESIDE if flat else size[1])
        level: Any = {"rotation": 0, "ha": "left", "va": "center"} if flat else {}
        scale.set_label(title, fontsize=8, **level)
        bar.tick_params(labelsize=7.5)
    return drawn


def _norm(figure: Grid) -> Normalize | None:
    """From the lowest to the highest value; None where there is none."""
    known = [v for line in figure.values for v in line if v is not None and math.isfinite(v)]
    if figure.log:
        known = [value for value in known if value > 0]
    if not known:
        return None
    low, high = min(known), max(known)
    if low == high:
        high = low + 1 if not figure.log else low * 10
    return LogNorm(low, high) if figure.log else Normalize(low, high)


def _cells(axis: Axes, figure: Grid, colours: Colormap, norm: Normalize | None) -> None:
    for row, (values, texts) in enumerate(zip(figure.values, figure.texts, strict=True)):
        for column, (value, text) in enumerate(zip(values, texts, strict=True)):
            shown = value is not None and math.isfinite(value) and norm is not None
            share = _share(norm, value) if norm is not None and value is not None else math.nan
            colour = colours(share) if shown else (0.93, 0.93, 0.93, 1.0)
            axis.fill_between(
                [column + 0.02, column + 0.98], row + 0.03, row + 0.97, color=colour, linewidth=0
            )
            light = 0.2126 * colour[0] + 0.7152 * colour[1] + 0.0722 * colour[2]
            axis.text(
                *(column + 0.5, row + 0.52, text),
                ha="center",
                va="center",
                fontsize=7.5,
                color="black" if light > 0.45 else "white",
            )


def _mesh(axis: Axes, figure: Grid, colours: Colormap, norm: Normalize | None) -> None:
    """Cells that nothing is written in, such as an attention matrix: too many for one by one."""
    values = [[math.nan if value is None else value for value in line] for line in figure.values]
    axis.set_facecolor((0.93, 0.93, 0.93))
    axis.pcolormesh(np.array(values), cmap=colours, norm=norm)


def _share(norm: Normalize, value: float) -> float:
    """Where a value lies on the scale of colours, 0 … 1."""
    least: Any = norm.vmin
    return float(norm(max(value, least if least is not None else value)))
