"""How every figure looks, and how it is written so that equal numbers give equal bytes."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from normattn.atomic import write_bytes

# Okabe and Ito's palette, which colour-blind readers can tell apart; yellow is too pale for lines.
_KNOWN = {"Baseline": "#000000", "QNA": "#E69F00", "KNA": "#0072B2", "CosA": "#009E73"}
_OTHERS = (
    *("#D55E00", "#CC79A7", "#56B4E9", "#8C6D31", "#7F7F7F"),
    *("#332288", "#44AA99", "#AA4466"),
)
_MARKERS = {"Baseline": "o", "QNA": "^", "KNA": "s", "CosA": "D"}
_OTHER_MARKERS = ("v", "P", "X", "<", ">", "h", "p", "*")
_VARIANTS = 8  # lines that a panel bears
REFERENCE = "Baseline"
"""The variant that every page of a figure shows."""

_SETTINGS: dict[str, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E5E5E5",
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.5,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "svg.hashsalt": "normattn",
    "svg.fonttype": "path",
}


@contextmanager
def house_style() -> Iterator[None]:
    """Matplotlib's own defaults with the settings of this house, whatever the user's are."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(cast(Any, _SETTINGS))
        yield


def save(figure: Figure, folder: Path, stem: str) -> list[Path]:
    """Write `stem`.png (150 dots per inch) and `stem`.svg without dates or versions."""
    png, svg = io.BytesIO(), io.BytesIO()
    canvases: tuple[Any, Any] = (FigureCanvasAgg(figure), FigureCanvasSVG(figure))
    canvases[0].print_png(png, metadata={"Software": None})
    canvases[1].print_svg(svg, metadata={"Date": None, "Creator": None})
    paths = [folder / f"{stem}.png", folder / f"{stem}.svg"]
    for path, content in zip(paths, (png, svg), strict=True):
        write_bytes(path, content.getvalue())
    return paths


def write_around(
    figure: Figure, size: tuple[float, float], heading: Sequence[str], caption: Sequence[str]
) -> None:
    """The lines of a bold heading above a figure of `size` inches, those of a caption below it."""
    left = 0.15 / size[0]
    above, below = "\n".join(heading), "\n".join(caption)
    figure.text(left, 1 - 0.13 / size[1], above, fontsize=11, fontweight="bold", va="top")
    figure.text(left, 0.1 / size[1], below, fontsize=7.5, color="#404040", va="bottom")


def pages(groups: Sequence[str], most: int) -> list[list[str]]:
    """The groups of a figure's lines in pages of at most `most` entries; a group stays whole."""
    found: list[list[str]] = []
    count = Counter(groups)
    room = 0
    for group in dict.fromkeys(groups):
        if not found or count[group] > room:
            found.append([])
            room = most
        found[-1].append(group)
        room -= count[group]
    return found


def variant_pages(variants: Sequence[str]) -> list[list[str]]:
    """The distinct variants in pages of 8; every page after the first shows the baseline again."""
    distinct = list(dict.fromkeys(variants))
    first, rest = distinct[:_VARIANTS], distinct[_VARIANTS:]
    again = [REFERENCE] if REFERENCE in first else []
    step = _VARIANTS - len(again)
    return [first, *(again + rest[i : i + step] for i in range(0, len(rest), step))]


def label_width(names: Sequence[str]) -> float:
    """Inches that the names at the ends of lines take to the right of a panel."""
    return max(1.12, 0.3 + 0.062 * max(map(len, names)))


def paged_stem(stem: str, page: int) -> str:
    """`stem` for the first page (0), `stem_2` for the second."""
    return stem if page == 0 else f"{stem}_{page + 1}"


def file_stem(*parts: str) -> str:
    """The parts joined by underscores, without what file names take badly."""
    return re.sub(r"[^A-Za-z0-9.+_-]+", "_", "_".join(parts))


def line_style(variant: str, variants: Sequence[str]) -> dict[str, Any]:
    """Colour and marker by base variant, dashes and hollow markers for `-logn`.

    `variants` are all that the figure shows: it decides the colours of those unknown here.
    """
    base, logn = _base(variant)
    unknown = sorted({name for name, _ in map(_base, variants)} - set(_KNOWN))
    place = unknown.index(base) if base in unknown else 0
    colour = _KNOWN.get(base, _OTHERS[place % len(_OTHERS)])
    marker = _MARKERS.get(base, _OTHER_MARKERS[place % len(_OTHER_MARKERS)])
    return {
        "color": colour,
        "linestyle": (0, (4, 1.8)) if logn else "-",
        "marker": marker,
        "markersize": 4.0,
        "markerfacecolor": "white" if logn else colour,
        "markeredgecolor": colour,
    }


def method_title(method: str) -> str:
    """What a panel shows, in words."""
    return f"with {method}" if method else "as trained (no method)"


def spread(values: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Heights for labels that want to stand at `values`, at least `gap` apart, in low … high.

    Labels keep the order of their values; a crowd of labels is centred on the crowd's mean.
    """
    if len(values) > 1:
        gap = min(gap, (high - low) / (len(values) - 1))
    order = sorted(range(len(values)), key=lambda i: (values[i], i))
    crowds: list[tuple[float, int]] = []  # (mean of the wanted heights, number of labels)
    for i in order:
        crowds.append((min(max(values[i], low), high), 1))
        while len(crowds) > 1 and _overlap(crowds[-2], crowds[-1], gap, low, high):
            (a, m), (b, n) = crowds.pop(-2), crowds.pop()
            crowds.append(((a * m + b * n) / (m + n), m + n))
    heights = [
        _bottom(crowd, gap, low, high) + gap * place
        for crowd in crowds
        for place in range(crowd[1])
    ]
    result = [0.0] * len(values)
    for height, i in zip(heights, order, strict=True):
        result[i] = height
    return result


def _bottom(crowd: tuple[float, int], gap: float, low: float, high: float) -> float:
    """Where the lowest label of a crowd stands."""
    extent = gap * (crowd[1] - 1)
    return min(max(crowd[0] - extent / 2, low), high - extent)


def _overlap(
    below: tuple[float, int], above: tuple[float, int], gap: float, low: float, high: float
) -> bool:
    top = _bottom(below, gap, low, high) + gap * (below[1] - 1)
    return _bottom(above, gap, low, high) - top < gap * (1 - 1e-9)


def label_ends(
    axes: Axes, ends: Sequence[tuple[str, float, float]], colours: Sequence[str], gap: float
) -> None:
    """Write each line's name to the right of the panel, joined to the line's last point.

    `ends` are (name, x, y) of the last points; `gap` is the least distance in y between names.
    """
    low, high = map(float, axes.get_ylim())
    heights = spread([y for _, _, y in ends], gap, low, high)
    for (name, x, y), height, colour in zip(ends, heights, colours, strict=True):
        axes.annotate(
            name,
            xy=(x, y),
            xytext=(1.05, height),
            textcoords=axes.get_yaxis_transform(),
            va="center",
            fontsize=7.5,
            color=colour,
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": colour,
                "linewidth": 0.5,
                "alpha": 0.7,
                "relpos": (0, 0.5),
            },
        )


def _base(variant: str) -> tuple[str, bool]:
    return variant.removesuffix("-logn"), variant.endswith("-logn")
