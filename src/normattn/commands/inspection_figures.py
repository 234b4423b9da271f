"""What an inspection found, as figures: layer by head, by position and step, one head's α."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from normattn.atomic import write_bytes
from normattn.diagnostics.records import (
    DiagnosticsLine,
    InspectionRecord,
    LayerRecord,
)
from normattn.diagnostics.records import (
    Grid as Values,
)
from normattn.report.figure import Curves, Figure, Grid, Line, Panel, Point, named
from normattn.report.plots import draw

MAPS = {
    "entropy_share": "entropy / ln n",
    "largest": "largest logit",
    "first_mass": "attention to the first token",
    "sink_mass": "attention to the learned sink",
    "beyond_mass": "attention at i − j ≥ L",
    "angle_mass": "attention at unseen angles",
}
CURVES = ("entropy_share", "largest", "first_mass", "beyond_mass")
PLACED = {
    "q_norm": "mean ‖q‖",
    "k_norm": "mean ‖k‖",
    "q_normed": "mean ‖q‖ after its norm",
    "k_normed": "mean ‖k‖ after its norm",
    "cosine": "median of cos(q, k)",
}
TRAINED = {
    "entropy_share": "entropy / ln n",
    "largest": "largest logit",
    "first_mass": "attention to the first token",
    "q_norm": "mean ‖q‖",
    "k_norm": "mean ‖k‖",
}
_NUMBERS = 260  # cells that have a number each
_MOST_LINES = 12


def layer_titles(names: Sequence[str]) -> list[str]:
    """Short names of layers: the parts of their paths that tell them apart, or just numbers."""
    paths = [name.split(".") for name in names]
    numbers = [[part for part in path if part.isdigit()] for path in paths]
    if all(len(each) == 1 for each in numbers) and len({each[0] for each in numbers}) == len(names):
        return [each[0] for each in numbers]
    dull = {"blocks", "mixer", "sublayer", "layers"}
    return [" ".join(part for part in path if part not in dull) or "0" for path in paths]


def write_figures(figures: Sequence[Figure], folder: Path) -> list[Path]:
    """Every figure that shows something, as an image of its name; the paths."""
    paths = []
    for figure in named(figures):
        paths.append(folder / f"{figure.name}.png")
        write_bytes(paths[-1], draw(figure))
    return paths


def layer_figures(record: InspectionRecord, title: str) -> list[Figure]:
    """Cells layer × head of everything that is not the same everywhere, as `layers_FIELD`.

    Means over all queries of the texts; the largest logit is that of any visible pair.
    """
    titles = layer_titles([layer.name for layer in record.layers])
    heads = max(layer.heads for layer in record.layers)
    found: list[Figure] = []
    for field, name in MAPS.items():
        rows = tuple(_padded(layer.by_head(field), heads) for layer in record.layers)
        known = [value for row in rows for value in row if value is not None]
        if not known or (field.endswith("_mass") and max(known) == 0):
            continue
        digits = 3 if max(known) < 0.1 else 2 if max(known) < 10 else 1
        numbers = len(rows) * heads <= _NUMBERS
        found.append(
            Grid(
                f"layers_{field}",
                f"{title}: {name}",
                tuple(titles),
                tuple(map(str, range(heads))),
                rows,
                tuple(tuple(_number(value, digits, numbers) for value in row) for row in rows),
                *("head", "layer", name),
            )
        )
    return found


def _padded(values: Sequence[float | None], heads: int) -> tuple[float | None, ...]:
    """One value for every head of the widest layer."""
    return (*values, *(None,) * (heads - len(values)))


def _number(value: float | None, digits: int, wanted: bool) -> str:
    return "" if value is None or not wanted else f"{value:.{digits}f}"


def position_figure(record: InspectionRecord, title: str) -> Figure:
    """A line per layer over the query's position (of ‖k‖ the key's), as `positions`.

    The mean over a layer's heads, for the largest logit the largest.
    """
    titles = layer_titles([layer.name for layer in record.layers])
    middles = [(a + b) / 2 for a, b in zip(record.edges, record.edges[1:], strict=False)]
    panels = []
    for field in (*CURVES, *PLACED):
        lines = []
        for name, layer in zip(titles, record.layers, strict=True):
            grid = _by_position(layer, field)
            columns = zip(middles, zip(*grid, strict=True), strict=True) if grid else ()
            points = tuple(
                Point(middle, _over_heads(field, values))
                for middle, column in columns
                if (values := [value for value in column if value is not None])
            )
            if points:
                lines.append(Line(name, points))
        if any(point.value for line in lines for point in line.points):
            label = PLACED.get(field) or MAPS[field]
            panels.append(Panel(label, _few(lines), "position of the query", label))
    shown = tuple(panels) if len(record.edges) >= 4 else ()
    return Curves("positions", title, shown, shared_y=False)


def _over_heads(field: str, values: Sequence[float]) -> float:
    return max(values) if field == "largest" else sum(values) / len(values)


def _by_position(layer: LayerRecord, field: str) -> Values | None:
    """A field by head and bin, a norm by where the query or key stands, the cosines' middle."""
    if field == "cosine":
        at = layer.cosines_at
        return None if at is None else tuple(tuple(row[2] for row in head) for head in at)
    grid: Values | None = layer.norms.get(field) if field in PLACED else getattr(layer, field)
    # A unit vector's norm is no news at any position.
    values = [value for head in grid or () for value in head if value is not None]
    flat = field.endswith("normed") and values and max(values) - min(values) < 1e-3 * max(values)
    return None if flat else grid


def training_figure(lines: Sequence[DiagnosticsLine], title: str) -> Figure:
    """A line per layer over the steps of a training, before each step's update, as `training`.

    The mean over a layer's heads, for the largest logit the largest.
    """
    names = list(lines[-1].layers) if len(lines) > 1 else []
    panels = []
    for field, label in TRAINED.items():
        found = []
        for name, short in zip(names, layer_titles(names), strict=True):
            points = []
            for line in lines:
                heads = getattr(line.layers[name], field) if name in line.layers else ()
                values = [value for value in heads or () if value is not None]
                if values:
                    points.append(Point(float(line.step), _over_heads(field, values)))
            if points:
                found.append(Line(short, tuple(points)))
        if found:
            panels.append(Panel(label, _few(found), "step", label))
    return Curves("training", title, tuple(panels), shared_y=False)


def attention_figure(
    name: str, title: str, alpha: NDArray[np.float64], words: Sequence[Sequence[str]]
) -> Figure:
    """The attention of one head (T, S) to one text: rows are queries, columns keys.

    The colour is √α, so that weak attention shows; · stands for a space, ↵ for a line's end.
    """
    queries, keys = ([_shown(token) for token in side] for side in words)
    return Grid(
        name,
        title,
        tuple(queries),
        tuple(keys),
        tuple(tuple(map(float, row)) for row in np.sqrt(alpha)),
        tuple(("",) * len(keys) for _ in queries),
        *("key", "query", "√α"),
    )


def _shown(token: str) -> str:
    """A token as one short word of visible characters that the font has."""
    text = token.replace(" ", "·").replace("\n", "↵").replace("\t", "→")
    return "".join(c if c.isprintable() else "?" for c in text)[:10]


def _few(lines: Sequence[Line]) -> tuple[Line, ...]:
    """At most 12 lines, evenly chosen, the first and the last among them."""
    if len(lines) <= _MOST_LINES:
        return tuple(lines)
    places = np.linspace(0, len(lines) - 1, _MOST_LINES).round().astype(int)
    return tuple(lines[place] for place in places)
