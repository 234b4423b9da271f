"""The figures of an inspection: layer by head, by position and step, the attention of one head."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from normattn.lab.diagnostics.inspection import Array
from normattn.lab.report.figure import Curves, Figure, Grid, Line, Panel, Point
from normattn.lab.report.view import View
from normattn.lab.studies.inspect.measured import (
    DRAWN,
    KEY,
    NORMED,
    QUANTITIES,
    QUERY,
    TRAINING,
    Quantity,
    heads,
    inspected,
    layers,
    middles,
    over_heads,
    positions,
    told,
    trained_layers,
)

GRIDS = ("entropy_share", "largest", "first_mass", "sink_mass", "beyond_mass", "angle_mass")
PLACED = ("entropy_share", "largest", "first_mass", "beyond_mass", "q_norm", "k_norm")
TRAINED = ("entropy_share", "largest", "first_mass", "q_norm", "k_norm")
COSINE = Quantity("cosine", "median of cos(q, k)", "cosine")
_NUMBERS = 260  # cells that have a number each
_MOST_LINES = 12


def figures(view: View) -> list[Figure]:
    """Grids of layers and heads, curves over position and training, single heads."""
    score, method, texts = inspected(view).select("row", "method", "factor.texts").row(0)
    name = f"{score} with {method}" if method else score
    return [
        *_by_layer(view, f"Attention of {name}: {texts}"),
        _by_position(view, f"Attention by position, {name}: {texts}"),
        _by_step(view, f"Attention while {name} trained"),
        *_heads(view, name),
    ]


def _by_layer(view: View, title: str) -> list[Figure]:
    """Cells layer × head of everything that is not 0 everywhere, as `layers_FIELD`.

    Means over all queries of the texts; the largest logit is that of any visible pair.
    """
    titles = tuple(layers(view).values())
    grids: list[Figure] = []
    for quantity in told(view, [quantity for quantity in QUANTITIES if quantity.name in GRIDS]):
        values = [heads(view, quantity.name, layer) for layer in layers(view)]
        width = max(map(len, values))
        rows = tuple(_filled(line, width) for line in values)
        most = max((value for row in rows for value in row if value is not None), default=0.0)
        digits = 3 if most < 0.1 else 2 if most < 10 else 1
        numbers = len(rows) * width <= _NUMBERS
        grids.append(
            Grid(
                f"layers_{quantity.name}",
                f"{title}: {quantity.title}",
                titles,
                tuple(map(str, range(width))),
                rows,
                tuple(
                    tuple(
                        f"{value:.{digits}f}" if numbers and value is not None else ""
                        for value in row
                    )
                    for row in rows
                ),
                *("head", "layer", quantity.title),
            )
        )
    return grids


def _filled(values: Array, width: int) -> tuple[float | None, ...]:
    """One value for every head of the widest layer."""
    known = [float(value) if math.isfinite(value) else None for value in values]
    return (*known, *(None,) * (width - len(known)))


def _by_position(view: View, title: str) -> Figure:
    """A line per layer over the query's position (of ‖k‖ the key's), as `positions`.

    The mean over a layer's heads, for the largest logit the largest.
    """
    places = middles(view)
    shown = [quantity for quantity in QUANTITIES if quantity.name in PLACED]

    def values(quantity: str, layer: int) -> Sequence[tuple[float, Array]]:
        grid = positions(view, quantity, layer)
        return () if _is_flat(quantity, grid) else list(zip(places, grid.T, strict=bool(grid.size)))

    panels = _panels([*shown, *NORMED, COSINE], layers(view), values, "position of the query")
    return Curves("positions", title, panels if len(places) >= 3 else (), shared_y=False)


def _is_flat(quantity: str, grid: Array) -> bool:
    """Whether nothing is to be seen: a unit vector's norm is no news at any position."""
    known = grid[np.isfinite(grid)]
    if not len(known):
        return True
    return quantity.endswith("normed") and float(np.ptp(known)) < 1e-3 * float(known.max())


def _by_step(view: View, title: str) -> Figure:
    """A line per layer over the steps of a training, before each step's update, as `training`."""
    trained = view.frame.filter(protocol=TRAINING)

    def values(quantity: str, layer: int) -> Sequence[tuple[float, Array]]:
        lines = trained.filter(statistic=quantity, layer=layer).sort("bin", "head")
        return [
            (float(step[0]), part["sum"].to_numpy())
            for step, part in lines.group_by("bin", maintain_order=True)
        ]

    shown = [quantity for quantity in QUANTITIES if quantity.name in TRAINED]
    several = trained["bin"].n_unique() > 1
    panels = _panels(shown, trained_layers(view), values, "step") if several else ()
    return Curves("training", title, panels, shared_y=False)


def _panels(
    quantities: Sequence[Quantity],
    names: Mapping[int, str],
    values: Callable[[str, int], Sequence[tuple[float, Array]]],
    x_title: str,
) -> tuple[Panel, ...]:
    """A panel for each quantity that is not 0 everywhere, a line for each layer."""
    panels = []
    for quantity in quantities:
        lines = []
        for layer, name in names.items():
            points = [
                Point(x, over_heads(quantity.name, y)) for x, y in values(quantity.name, layer)
            ]
            known = tuple(point for point in points if math.isfinite(point.value))
            if known:
                lines.append(Line(name, known))
        if any(point.value for line in lines for point in line.points):
            panels.append(Panel(quantity.title, _few(lines), x_title, quantity.title))
    return tuple(panels)


def _heads(view: View, name: str) -> list[Figure]:
    """The attention of single heads (T, S) to one text: rows are queries, columns keys.

    The colour is √α, so that weak attention shows; · stands for a space, ↵ for a line's end.
    """
    drawn = view.frame.filter(protocol=DRAWN)
    grids: list[Figure] = []
    places = drawn.select("layer", "head").unique().sort("layer", "head").rows()
    titles = layers(view)
    for layer, head in places:
        cells = drawn.filter(layer=layer, head=head).sort("unit", "bin")
        queries = cells.unique("unit", keep="first", maintain_order=True)[QUERY].to_list()
        keys = cells.unique("bin", keep="first", maintain_order=True)[KEY].to_list()
        colours = np.sqrt(cells["sum"].to_numpy()).reshape(len(queries), len(keys))
        grids.append(
            Grid(
                "attention" if len(places) == 1 else f"attention_{layer}_{head}",
                f"{name}: layer {titles[layer]}, head {head}",
                tuple(map(_shown, queries)),
                tuple(map(_shown, keys)),
                tuple(tuple(map(float, row)) for row in colours),
                tuple(("",) * len(keys) for _ in queries),
                *("key", "query", "√α"),
            )
        )
    return grids


def _shown(token: str) -> str:
    """A token as one short word of visible characters that the font has."""
    text = token.replace(" ", "·").replace("\n", "↵").replace("\t", "→")
    return "".join(c if c.isprintable() else "?" for c in text)[:10]


def _few(lines: Sequence[Line]) -> tuple[Line, ...]:
    """At most 12 lines, evenly chosen, the first and the last among them."""
    if len(lines) <= _MOST_LINES:
        return tuple(lines)
    places = np.linspace(0, len(lines) - 1, _MOST_LINES).round().astype(int)
    return tuple(lines[index] for index in places)
