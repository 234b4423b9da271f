"""Estimates as dots with their intervals, one row per name: how a column of a table looks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap

from matplotlib.figure import Figure

from normattn.reports.figures.style import REFERENCE, house_style, save, write_around
from normattn.reports.metrics import Estimate

_ROW, _PANEL = 0.27, 3.6  # inches: between two names, and the width of a panel
_COLOUR, _BASE = "#0072B2", "#000000"


@dataclass(frozen=True)
class Column:
    """One statistic: its axis label, and an estimate for each name (None: not measured)."""

    label: str
    estimates: Sequence[tuple[str, Estimate | None]]


def draw_intervals(
    columns: Sequence[Column], folder: Path, stem: str, *, title: str, caption: str
) -> list[Path]:
    """Draw the columns side by side as `stem`; a dotted line marks the baseline's value.

    All columns name the same rows in the same order. Returns the files written.
    """
    names = [name for name, _ in columns[0].estimates]
    left = 0.35 + 0.075 * max(map(len, names))
    width = left + _PANEL * len(columns) + 0.25
    heading, notes = wrap(title, round(10 * width)), wrap(caption, round(16 * width))
    top, bottom = 0.35 + 0.22 * len(heading), 0.72 + 0.14 * len(notes)
    size = (width, top + bottom + _ROW * (len(names) + 1))
    with house_style():
        figure = Figure(figsize=size, dpi=150)
        axes = figure.subplots(1, len(columns), sharey=True, squeeze=False)[0]
        figure.subplots_adjust(
            left=left / width,
            right=1 - 0.25 / width,
            top=1 - top / size[1],
            bottom=bottom / size[1],
            wspace=0.1,
        )
        for axis, column in zip(axes, columns, strict=True):
            for place, (name, value) in enumerate(column.estimates):
                if value is None:
                    continue
                colour = _BASE if name == REFERENCE else _COLOUR
                if value.low is not None and value.high is not None:
                    axis.hlines(place, value.low, value.high, color=colour, linewidth=1.2)
                axis.plot(value.value, place, "o", color=colour, markersize=4.5)
                if name == REFERENCE:
                    axis.axvline(value.value, color=colour, linewidth=0.9, linestyle=":")
            axis.set_xlabel(column.label)
            axis.grid(visible=False, axis="y")
        axes[0].set_yticks(range(len(names)), names)
        axes[0].set_ylim(len(names) - 0.4, -0.6)
        write_around(figure, size, heading, notes)
        return save(figure, folder, stem)
