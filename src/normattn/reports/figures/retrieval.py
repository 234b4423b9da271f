"""Retrieval as heat maps: the share of right answers by depth and length, a panel per method.

Whole answers have one figure and their tokens another: a model that is only half able to copy
shows nothing in the first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from normattn.reports.cells import method_labels
from normattn.reports.figures.style import file_stem, house_style, method_title, save, write_around
from normattn.reports.retrieval import TITLES, RetrievalCell

_CELL, _LINE, _COLUMNS = 0.42, 0.27, 4  # inches: one cell; panels beside each other at most
_MAP = "cividis"

_ASKED = {
    "passkey": "one statement at a depth of held-out text, asked for at the end",
    "multi_key": "four statements, the asked one at the depth, the others anywhere",
    "variable_tracking": "a chain of three that begins at the depth, asked link by link",
}


def draw_retrieval(cells: Sequence[RetrievalCell], folder: Path) -> list[Path]:
    """Draw `retrieval_<task>_<variant>` and `…_tokens` for every task and variant in `cells`."""
    paths = []
    several = len({cell.row.train_length for cell in cells}) > 1
    for variant, length in dict.fromkeys((c.row.variant, c.row.train_length) for c in cells):
        own = [c for c in cells if (c.row.variant, c.row.train_length) == (variant, length)]
        for task in TITLES:
            shown = [cell for cell in own if cell.task == task]
            stem = file_stem("retrieval", task, variant, *[str(length)] * several)
            for kind, end in (("exact", ""), ("tokens", "_tokens")) if shown else ():
                with house_style():
                    paths += save(_figure(shown, variant, task, kind), folder, stem + end)
    return paths


def _figure(cells: Sequence[RetrievalCell], variant: str, task: str, kind: str) -> Figure:
    labels = method_labels(cell.row for cell in cells)
    rows = list(labels)
    lengths = sorted({cell.length for cell in cells})
    columns = min(_COLUMNS, len(rows))
    lines = math.ceil(len(rows) / columns)
    wide, high = max(1.5, _CELL * len(lengths)), _LINE * len(cells[0].depths)
    width, gap = 0.75 + (wide + 0.35) * columns + 0.75, 0.72
    what = "answers right as a whole" if kind == "exact" else "tokens of the answers"
    title = f"Retrieval, {TITLES[task]}, {variant}: {what} (%)"
    caption = wrap(
        f"{_ASKED[task][0].upper()}{_ASKED[task][1:]}. Rows: depth of the statement; columns: "
        "tokens of context, and training lengths; right of the white line the text is longer than "
        f"any seen in training. Behind a cell: {_samples(cells)}. m: mean of the panel.",
        round(16 * width),
    )
    heading = wrap(title, round(10 * width))
    top, bottom = 0.42 + 0.2 * len(heading) + 0.2, 0.55 + 0.14 * len(caption)
    size = (width, lines * (high + gap) - gap + 0.2 + top + bottom)
    figure = Figure(figsize=size, dpi=150)
    for index, row in enumerate(rows):
        x = 0.75 + (wide + 0.35) * (index % columns)
        y = size[1] - top - high - (high + gap) * (index // columns)
        axis = figure.add_axes((x / size[0], y / size[1], wide / size[0], high / size[1]))
        found = {c.length: _values(c, kind) for c in cells if c.row == row}
        _panel(axis, found, lengths, cells[0].depths, row.train_length)
        if index % columns:
            axis.set_yticklabels([])
        else:
            axis.set_ylabel("depth", fontsize=8)
        values = [value for column in found.values() for value in column]
        mean = sum(values) / len(values)
        axis.set_title(f"{method_title(labels[row])}  (m {mean:.0f})", loc="left", fontsize=8)
    _colour_bar(figure, size, top, high)
    write_around(figure, size, heading, caption)
    return figure


def _panel(
    axis: Axes,
    found: dict[int, list[float]],
    lengths: Sequence[int],
    depths: Sequence[float],
    unit: int,
) -> None:
    """One method: `found` holds the shares by depth at each length; `unit` is L."""
    axis.set_xlim(0, len(lengths))
    axis.set_ylim(len(depths), 0)
    axis.grid(False)
    axis.spines[:].set_visible(False)
    axis.tick_params(length=0, labelsize=7)
    axis.set_xticks([i + 0.5 for i in range(len(lengths))])
    axis.set_xticklabels([f"{_short(length)}\n{length / unit:g}×" for length in lengths])
    axis.set_yticks([i + 0.5 for i in range(len(depths))])
    axis.set_yticklabels([f"{100 * depth:g} %" for depth in depths])
    colours = mpl.colormaps[_MAP]
    for column, length in enumerate(lengths):
        for line in range(len(depths)):
            if length not in found:
                _number(axis, column, line, "–", "#808080")
                continue
            value = found[length][line]
            axis.add_patch(Rectangle((column, line), 1, 1, color=colours(value / 100), linewidth=0))
            _number(axis, column, line, f"{value:.0f}", "white" if value < 47 else "black")
    inside = sum(length <= unit for length in lengths)
    if 0 < inside < len(lengths):
        axis.axvline(inside, color="white", linewidth=2.5)


def _values(cell: RetrievalCell, kind: str) -> list[float]:
    return [share.value for share in (cell.exact if kind == "exact" else cell.tokens)]


def _number(axis: Axes, column: int, line: int, text: str, colour: str) -> None:
    axis.text(column + 0.5, line + 0.52, text, ha="center", va="center", fontsize=6.5, color=colour)


def _colour_bar(figure: Figure, size: tuple[float, float], top: float, high: float) -> None:
    place = ((size[0] - 0.6) / size[0], (size[1] - top - high) / size[1])
    axis = figure.add_axes((*place, 0.12 / size[0], high / size[1]))
    bar = figure.colorbar(ScalarMappable(Normalize(0, 100), mpl.colormaps[_MAP]), cax=axis)
    bar.set_ticks([0, 50, 100])
    bar.ax.tick_params(labelsize=7, length=2)
    bar.outline.set_visible(False)


def _samples(cells: Sequence[RetrievalCell]) -> str:
    counts = sorted({(cell.samples, cell.seeds) for cell in cells})
    return "; ".join(f"{n} samples" + (f" of {s} seeds" if s > 1 else "") for n, s in counts)


def _short(length: int) -> str:
    return f"{length / 1024:g}k" if length >= 1024 and length % 512 == 0 else str(length)
