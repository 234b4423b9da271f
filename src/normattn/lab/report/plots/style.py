"""How every image looks, and how it is written so that equal figures give equal bytes."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from contextlib import contextmanager
from textwrap import wrap
from typing import Any, cast

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath

_SETTINGS: dict[str, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E5E5E5",
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.5,
    "figure.dpi": 150,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
}
LETTER = 0.066
"""Inches that a letter of a label takes, at most on average."""


@contextmanager
def house_style() -> Iterator[None]:
    """Matplotlib's own defaults with the settings of this house, whatever the user's are."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(cast(Any, _SETTINGS))
        yield


def rendered(figure: Figure) -> bytes:
    """The bytes of a PNG file, without dates or versions."""
    file = io.BytesIO()
    canvas: Any = FigureCanvasAgg(figure)
    canvas.print_png(file, metadata={"Software": None})
    return file.getvalue()


def axes(
    title: str,
    rows: int,
    columns: int,
    panel: tuple[float, float],
    *,
    left: float = 0.68,
    beside: float = 0.2,
    above: float = 0.3,
    below: float = 0.55,
) -> tuple[Figure, list[Axes]]:
    """A titled figure of rows × columns axes of `panel` inches each.

    Around every axes `left`, `beside`, `above` and `below` are free for what is written there, in
    inches.
    """
    width = columns * (left + panel[0] + beside)
    heading = wrap(title, max(20, round(10.5 * width)))
    top = 0.2 + 0.2 * len(heading)
    height = top + rows * (above + panel[1] + below)
    figure = Figure(figsize=(width, height))
    figure.text(
        *(0.12 / width, 1 - 0.1 / height, "\n".join(heading)),
        fontsize=11,
        fontweight="bold",
        va="top",
    )
    made = []
    for row in range(rows):
        for column in range(columns):
            x = column * (left + panel[0] + beside) + left
            y = height - top - row * (above + panel[1] + below) - above - panel[1]
            made.append(
                figure.add_axes((x / width, y / height, panel[0] / width, panel[1] / height))
            )
    return figure, made


def wrapped(text: str, inches: float) -> str:
    """The text in lines that fit."""
    return "\n".join(wrap(text, max(8, round(inches / LETTER))))


def inches(texts: list[str]) -> float:
    """The room that the longest of some labels takes."""
    return max((max(LETTER * len(text), _width(text)) for text in texts), default=0.0)


def _width(text: str) -> float:
    """The room of a label in the font and size of the axes' names."""
    font = FontProperties(family=_SETTINGS["font.family"], size=_SETTINGS["font.size"])
    return float(TextPath((0, 0), text, prop=font).get_extents().width) / 72


def octaves(low: float, high: float, most: int = 8) -> list[float]:
    """Powers of two from `low` to `high`, at most about `most` of them."""
    first, last = math.ceil(math.log2(low) - 1e-9), math.floor(math.log2(high) + 1e-9)
    step = max(1, math.ceil((last - first + 1) / most))
    return [2.0**power for power in np.arange(first, last + 1, step)]


def number(value: float) -> str:
    """A number of an axis: 4,096 or 0.05."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:g}"
