"""What an inspection found, drawn: heat maps layer × head, curves, one head's attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from normattn.reports.diagnostics_records import (
    DiagnosticsLine,
    Grid,
    InspectionRecord,
    LayerRecord,
)
from normattn.reports.figures.lines import Line, LinePanel, draw_lines
from normattn.reports.figures.style import house_style, save, write_around
from normattn.reports.metrics import Estimate

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
_NUMBERS = 260  # cells that bear a number each
_MOST_LINES = 12


def layer_titles(names: Sequence[str]) -> list[str]:
    """Short names of layers: the parts of their paths that tell them apart, or just numbers."""
    paths = [name.split(".") for name in names]
    numbers = [[part for part in path if part.isdigit()] for path in paths]
    if all(len(each) == 1 for each in numbers) and len({each[0] for each in numbers}) == len(names):
        return [each[0] for each in numbers]
    dull = {"blocks", "mixer", "sublayer", "layers"}
    return [" ".join(part for part in path if part not in dull) or "0" for path in paths]


def draw_layers(record: InspectionRecord, folder: Path, title: str) -> list[Path]:
    """Heat maps layer × head of everything that is not the same everywhere, as `layers`."""
    titles = layer_titles([layer.name for layer in record.layers])
    heads = max(layer.heads for layer in record.layers)
    maps = {}
    for field, name in MAPS.items():
        grid = np.full((len(titles), heads), np.nan)
        for line, layer in enumerate(record.layers):
            for head, value in enumerate(layer.by_head(field)):
                grid[line, head] = np.nan if value is None else value
        if not np.isnan(grid).all() and not (field.endswith("_mass") and np.nanmax(grid) == 0):
            maps[name] = grid
    columns = min(3, len(maps))
    rows = math.ceil(len(maps) / columns)
    wide = max(1.9, 0.46 * heads) + 1.3
    tall = max(1.0, 0.27 * len(titles)) + 0.85
    caption = wrap(
        "Means over all queries of the texts; the largest logit is that of any visible pair. "
        "Entropy is H = lse − E[s] over the log of the number of visible keys: 0 looks at one key, "
        "1 at all alike. Colours run from the lowest (dark) to the highest (bright) of each map.",
        round(16.5 * wide * columns),
    )
    heading = wrap(title, round(9.5 * wide * columns))
    top, bottom = 0.25 + 0.22 * len(heading), 0.3 + 0.14 * len(caption)
    size = (wide * columns, tall * rows + top + bottom)
    with house_style():
        figure = Figure(figsize=size, dpi=150)
        for place, (name, grid) in enumerate(maps.items()):
            line, column = divmod(place, columns)
            inside = (wide - 1.3, tall - 0.85)
            axis = figure.add_axes(
                (
                    (wide * column + 0.65) / size[0],
                    (bottom + tall * (rows - 1 - line) + 0.45) / size[1],
                    inside[0] / size[0],
                    inside[1] / size[1],
                )
            )
            _map(figure, axis, grid, titles, name)
        write_around(figure, size, heading, caption)
        return save(figure, folder, "layers")


def _map(
    figure: Figure, axis: Axes, grid: NDArray[np.float64], titles: Sequence[str], name: str
) -> None:
    low, high = float(np.nanmin(grid)), float(np.nanmax(grid))
    image = axis.imshow(grid, cmap="cividis", aspect="auto", vmin=low, vmax=high)
    axis.grid(False)
    axis.spines[:].set_visible(False)
    axis.tick_params(length=0)
    axis.set_title(name, loc="left", fontweight="bold", fontsize=9)
    axis.set_xticks(range(grid.shape[1]))
    axis.set_yticks(range(len(titles)), titles, fontsize=8)
    axis.set_xlabel("head", fontsize=8)
    axis.set_ylabel("layer", fontsize=8)
    digits = 3 if high < 0.1 else 2 if high < 10 else 1
    if grid.size <= _NUMBERS:
        for line, column in np.ndindex(grid.shape):
            value = grid[line, column]
            if not np.isnan(value):
                dark = high > low and (value - low) / (high - low) < 0.47
                colour = "white" if dark or high == low else "black"
                text = f"{value:.{digits}f}"
                axis.text(column, line, text, ha="center", va="center", fontsize=7, color=colour)
    bar = figure.colorbar(image, ax=axis, fraction=0.05, pad=0.03)
    bar.ax.tick_params(labelsize=7)
    bar.outline.set_visible(False)


def draw_positions(record: InspectionRecord, folder: Path, title: str) -> list[Path]:
    """A line per layer over the query's position, means over heads, as `positions`."""
    titles = layer_titles([layer.name for layer in record.layers])
    middles = [(a + b) / 2 for a, b in zip(record.edges, record.edges[1:], strict=False)]
    panels = []
    for field in (*CURVES, *PLACED):
        lines = []
        for place, (name, layer) in enumerate(zip(titles, record.layers, strict=True)):
            grid = _by_position(layer, field)
            if grid is None:
                continue
            points = tuple(
                (middle, _estimate(max(values) if field == "largest" else _mean(values)))
                for middle, column in zip(middles, zip(*grid, strict=True), strict=True)
                if (values := [value for value in column if value is not None])
            )
            if points:
                lines.append(Line(name, points, _colour(place, len(titles))))
        if lines and any(estimate.value for line in lines for _, estimate in line.points):
            kept = _few(lines)
            label = PLACED.get(field) or MAPS[field]
            panels.append(LinePanel(label, label, kept))
    if len(record.edges) < 4 or not panels:
        return []
    return draw_lines(
        panels,
        folder,
        "positions",
        title=title,
        caption="Bins of the query's position, all texts (of ‖k‖ the key's); a line per layer: the "
        "mean over its heads, for the largest logit the largest.",
        x_label="position of the query",
    )


def _by_position(layer: LayerRecord, field: str) -> Grid | None:
    """A field by head and bin, a norm by where the query or key stands, the cosines' middle."""
    if field == "cosine":
        at = layer.cosines_at
        return None if at is None else tuple(tuple(row[2] for row in head) for head in at)
    grid: Grid | None = layer.norms.get(field) if field in PLACED else getattr(layer, field)
    # A unit vector's norm is no news at any position.
    values = [value for head in grid or () for value in head if value is not None]
    flat = field.endswith("normed") and values and max(values) - min(values) < 1e-3 * max(values)
    return None if flat else grid


def draw_training(lines: Sequence[DiagnosticsLine], folder: Path, title: str) -> list[Path]:
    """A line per layer over the steps of a training, means over heads, as `training`."""
    if len(lines) < 2:
        return []
    names = list(lines[-1].layers)
    titles = layer_titles(names)
    panels = []
    for field, label in TRAINED.items():
        found = []
        for place, (name, short) in enumerate(zip(names, titles, strict=True)):
            points = []
            for line in lines:
                heads = getattr(line.layers[name], field) if name in line.layers else ()
                values = [value for value in heads or () if value is not None]
                if values:
                    value = max(values) if field == "largest" else _mean(values)
                    points.append((float(line.step), _estimate(value)))
            if points:
                found.append(Line(short, tuple(points), _colour(place, len(names))))
        if found:
            panels.append(LinePanel(label, label, _few(found)))
    return draw_lines(
        panels,
        folder,
        "training",
        title=title,
        caption="The batches of the probed steps, before the step's update; a line per layer, "
        "named by its number: the mean over its heads, for the largest logit the largest.",
        x_label="step",
    )


def draw_attention(
    weights: Sequence[tuple[str, NDArray[np.float64]]],
    tokens: Sequence[Sequence[str]],
    folder: Path,
    title: str,
) -> list[Path]:
    """The attention of named heads (each (T, S)) to one text, as `attention`.

    `tokens` are the words of the queries and of the keys, written beside a head that stands alone.
    """
    columns = min(4, len(weights))
    rows = math.ceil(len(weights) / columns)
    alone = len(weights) == 1
    each = 1.6 + 0.095 * max(map(len, tokens)) if alone else 2.4
    lead, space = (1.0, 0.35) if alone else (0.3, 0.3)
    caption = wrap(
        "Brightness is the square root of α, so that weak attention shows. Rows are queries, "
        "columns keys; · stands for a space, ↵ for a line's end.",
        round(15 * each * columns),
    )
    heading = wrap(title, round(9.5 * (each * columns + lead)))
    top, bottom = 0.25 + 0.22 * len(heading), 0.3 + 0.14 * len(caption)
    under = 0.75 if alone else 0.1
    size = (each * columns + lead, (each + space) * rows + top + bottom + under)
    with house_style():
        figure = Figure(figsize=size, dpi=150)
        for place, (name, alpha) in enumerate(weights):
            line, column = divmod(place, columns)
            axis = figure.add_axes(
                (
                    (lead + each * column) / size[0],
                    (bottom + under + (each + space) * (rows - 1 - line)) / size[1],
                    (each - 0.2) / size[0],
                    (each - 0.2) / size[1],
                )
            )
            shade = mpl.colormaps["cividis"]
            axis.imshow(np.sqrt(alpha), aspect="auto", cmap=shade, vmin=0, vmax=1)
            axis.grid(False)
            axis.set_title(name, loc="left", fontsize=9 if alone else 7, fontweight="bold")
            if alone:
                down, across = ([_shown(token) for token in side] for side in tokens)
                axis.set_xticks(range(len(across)), across, rotation=90, fontsize=5.5)
                axis.set_yticks(range(len(down)), down, fontsize=5.5)
                axis.tick_params(length=0, pad=1)
            else:
                axis.set_xticks([])
                axis.set_yticks([])
        write_around(figure, size, heading, caption)
        return save(figure, folder, "attention")


def _shown(token: str) -> str:
    """A token as one short word of visible characters that the font has."""
    text = token.replace(" ", "·").replace("\n", "↵").replace("\t", "→")
    return "".join(c if c.isprintable() else "?" for c in text)[:10].replace("$", r"\$")


def _few(lines: Sequence[Line]) -> tuple[Line, ...]:
    """At most 12 lines, evenly chosen, the first and the last among them."""
    if len(lines) <= _MOST_LINES:
        return tuple(lines)
    places = np.linspace(0, len(lines) - 1, _MOST_LINES).round().astype(int)
    return tuple(lines[place] for place in places)


def _colour(place: int, count: int) -> str:
    """From dark to light, bottom layers first."""
    share = 0.0 if count < 2 else 0.85 * place / (count - 1)
    return str(mpl.colors.to_hex(mpl.colormaps["viridis"](share)))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _estimate(value: float) -> Estimate:
    return Estimate(value, None, None, 0, 0, 0)
