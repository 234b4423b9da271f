"""The table as a heat map: rows are variants × methods, columns are protocols."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from normattn.reports.figures.style import house_style, paged_stem, pages, save
from normattn.reports.markdown import column_title
from normattn.reports.table import COLUMNS, Row

_LINE, _TOP, _BOTTOM, _CELL = 0.23, 1.15, 0.75, 1.12  # inches
_ROWS = 64  # on a page


def draw_heat_map(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw the table as `table_heat_map`; darker is worse and brighter better in its column.

    A table of more than 64 rows goes on in `table_heat_map_2`, each page with its own colours.
    """
    paths = []
    for page, variants in enumerate(pages([row.key.variant for row in rows], _ROWS)):
        shown = [row for row in rows if row.key.variant in variants]
        paths += _draw_page(shown, folder, paged_stem("table_heat_map", page))
    return paths


def _draw_page(rows: Sequence[Row], folder: Path, stem: str) -> list[Path]:
    with house_style():
        label = 0.3 + 0.075 * max(len(row.name) for row in rows)
        size = (label + _CELL * len(COLUMNS) + 0.2, _TOP + _LINE * len(rows) + _BOTTOM)
        figure = Figure(figsize=size, dpi=150)
        axis = figure.add_axes(
            (
                label / size[0],
                _BOTTOM / size[1],
                _CELL * len(COLUMNS) / size[0],
                _LINE * len(rows) / size[1],
            )
        )
        _frame(axis, rows)
        for column, key in enumerate(COLUMNS):
            _column(axis, rows, column, key)
        _diverged(axis, rows)
        _separate(axis, rows)
        inch = 1 / size[1]
        title = "Next-token accuracy (%) of every variant and method"
        figure.text(
            0.15 / size[0], 1 - 0.3 * inch, title, fontsize=11, fontweight="bold", va="center"
        )
        figure.text(
            0.15 / size[0],
            0.08 * inch,
            "Colour runs from the lowest (dark) to the highest (bright) of each column. In "
            "brackets: tokens of context. Train length is always\nwithout a method; tax: points "
            "gained or lost there when the method is switched on; seen: the answer stands earlier\n"
            "in the text. Intervals are in table.md.",
            fontsize=7,
            color="#404040",
            va="bottom",
        )
        return save(figure, folder, stem)


def _frame(axis: Axes, rows: Sequence[Row]) -> None:
    axis.set_xlim(0, len(COLUMNS))
    axis.set_ylim(len(rows), 0)
    axis.grid(False)
    axis.spines[:].set_visible(False)
    axis.tick_params(length=0)
    axis.xaxis.tick_top()
    axis.set_xticks([column + 0.5 for column in range(len(COLUMNS))])
    axis.set_xticklabels([_wrapped(column_title(rows, key)) for key in COLUMNS], fontsize=8)
    axis.set_yticks([line + 0.5 for line in range(len(rows))])
    axis.set_yticklabels([row.name for row in rows], fontsize=8)


def _wrapped(title: str) -> str:
    return title.replace(", ", ",\n").replace(" (", "\n(")


def _column(axis: Axes, rows: Sequence[Row], column: int, key: str) -> None:
    """Fill a column; its own lowest and highest values give the ends of the colours."""
    values = [None if (cell := row.metrics[key]) is None else cell.value for row in rows]
    known = [value for value in values if value is not None]
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    colours = mpl.colormaps["cividis"]
    for line, value in enumerate(values):
        if value is None:
            if not (rows[line].empty and rows[line].diverged):
                _text(axis, column, line, "–", "#808080")
            continue
        share = 0.5 if high == low else (value - low) / (high - low)
        axis.add_patch(Rectangle((column, line), 1, 1, color=colours(share), linewidth=0))
        form = "+.1f" if key == "tax" else ".1f"
        _text(axis, column, line, f"{value:{form}}", "white" if share < 0.47 else "black")


def _text(axis: Axes, column: int, line: int, text: str, colour: str) -> None:
    axis.text(column + 0.5, line + 0.52, text, ha="center", va="center", fontsize=8, color=colour)


def _diverged(axis: Axes, rows: Sequence[Row]) -> None:
    for line, row in enumerate(rows):
        if row.empty and row.diverged:
            axis.add_patch(
                Rectangle(
                    (0, line),
                    len(COLUMNS),
                    1,
                    facecolor="#F2F2F2",
                    edgecolor="#BDBDBD",
                    hatch="////",
                    linewidth=0,
                )
            )
            axis.text(
                len(COLUMNS) / 2,
                line + 0.52,
                f"diverged at step {row.diverged[0].step}",
                ha="center",
                va="center",
                fontsize=8,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
            )


def _separate(axis: Axes, rows: Sequence[Row]) -> None:
    """A white line between one variant and the next, and thin ones between columns."""
    for line in range(1, len(rows)):
        if rows[line].key.variant != rows[line - 1].key.variant:
            axis.axhline(line, color="white", linewidth=2.5)
    for column in range(1, len(COLUMNS)):
        axis.axvline(column, color="white", linewidth=1.0)
