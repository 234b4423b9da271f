"""What do the layers and heads of a trained model attend to?

`normattn inspect RUN` measures entropy, largest logits, sinks, norms and cosines of every layer,
head and position on held-out text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import polars as pl

from normattn.lab.diagnostics.inspection import Array, by_head, by_position, cosine_counts
from normattn.lab.report.figures import Curves, Figure, Grid, Line, Panel, Point
from normattn.lab.report.tables import EMPTY_CELL, Cell, Column, Row, Table, text_column
from normattn.lab.report.view import View
from normattn.lab.stats import Estimate
from normattn.lab.stats.metrics import crossing
from normattn.lab.studies.base import Study
from normattn.score.spec import UNMODIFIED

KIND = "inspect"
TRAINING, DRAWN = "training", "drawn"
"""The protocols of diagnostics during training, and of single heads' attention to one text."""
QUERY, KEY = "factor.query", "factor.key"
"""The tokens of a query and a key in the drawn text."""
NUMBERS, MOST_LINES = 260, 12
"""The largest grid whose cells show numbers, and the largest number of lines in a panel."""


@dataclass(frozen=True)
class Quantity:
    """A statistic and how it is shown: its title, a short title for the terminal, its digits.

    `grid`: drawn by layer and head; `by_position`; `by_step`: drawn by training step.
    """

    name: str
    title: str
    short: str = ""
    digits: int = 3
    grid: bool = False
    by_position: bool = False
    by_step: bool = False


QUANTITIES = (
    Quantity("entropy", "entropy, nats", "entropy", 2),
    Quantity("entropy_share", "entropy / ln n", "/ ln n", 2, True, True, True),
    Quantity("largest", "largest logit", "largest", 1, True, True, True),
    Quantity("first_mass", "attention to the first token", "token\n0", 3, True, True, True),
    Quantity("sink_mass", "attention to the learned sink", "sink", 3, True),
    Quantity("beyond_mass", "attention at i − j ≥ L", "beyond\nL", 3, True, True),
    Quantity("angle_mass", "attention at unseen angles", "unseen", 3, True),
    Quantity("q_norm", "mean ‖q‖", "‖q‖", 1, by_position=True, by_step=True),
    Quantity("k_norm", "mean ‖k‖", "‖k‖", 1, by_position=True, by_step=True),
)
"""The statistics in tables and figures; measurements.parquet has more."""

# Measurements


def inspected(view: View) -> pl.DataFrame:
    """The measurements on the inspected texts."""
    return view.frame.filter(protocol=KIND)


def layers(rows: pl.DataFrame) -> dict[int, str]:
    """The layers of some rows, bottom first, and their display names.

    "layer 3" where numbers distinguish them, else the distinguishing parts of their paths, such as
    "decoder 0 cross".
    """
    layer_names = rows.select("layer", "factor.layer").unique().sort("layer").rows()
    paths = [name.split(".") for _, name in layer_names]
    numbers = [tuple(part for part in path if part.isdigit()) for path in paths]
    if all(len(number) == 1 for number in numbers) and len(set(numbers)) == len(layer_names):
        names = [f"layer {number[0]}" for number in numbers]
    else:
        common = {"blocks", "mixer", "sublayer", "layers"}
        names = [" ".join(part for part in path if part not in common) for path in paths]
    return {n: name or f"layer {n}" for (n, _), name in zip(layer_names, names, strict=True)}


def sharpest(rows: pl.DataFrame) -> tuple[int, int]:
    """The layer and the head with the smallest entropy / ln n."""
    shares = [
        (float(share), layer, head)
        for layer in layers(rows)
        for head, share in enumerate(by_head(rows, "entropy_share", layer))
        if np.isfinite(share)
    ]
    return min(shares)[1:] if shares else (0, 0)


def measured_quantities(rows: pl.DataFrame, quantities: Sequence[Quantity]) -> list[Quantity]:
    """The quantities that were measured, without shares of attention that are 0 everywhere."""
    groups = rows.filter(pl.col("of") > 0).group_by("statistic")
    nonzero = groups.agg((pl.col("sum") != 0).any().alias("any")).rows()
    names = {name for name, any_ in nonzero if any_ or not name.endswith("mass")}
    return [quantity for quantity in quantities if quantity.name in names]


def over_heads(quantity: Quantity, values: Array) -> float:
    """The mean over a layer's heads (largest logits: maximum); NaN where none is finite."""
    finite = values[np.isfinite(values)]
    if not len(finite):
        return float("nan")
    return float(finite.max() if quantity.name == "largest" else finite.mean())


# Tables


def _layer_rows(view: View) -> list[Row]:
    names = layers(inspected(view))
    return [Row(name.removeprefix("layer "), {"layer": n}) for n, name in names.items()]


def _layer_columns(view: View) -> list[Column]:
    """A column for each quantity, and the 5th and 95th percentile of cosines, mean over heads."""
    rows = inspected(view)

    def cell(quantity: Quantity, view: View, row: Row) -> Cell:
        number = over_heads(quantity, by_head(rows, quantity.name, row.where["layer"]))
        if not math.isfinite(number):
            return EMPTY_CELL
        return Cell(f"{number:.{quantity.digits}f}", Estimate(number, units=1))

    def cosines(view: View, row: Row) -> str | None:
        counts = cosine_counts(rows, row.where["layer"]).sum(1)
        if not counts.any():
            return None
        low, high = (crossing(counts, share, (-1.0, 1.0)).mean() for share in (0.05, 0.95))
        return f"{low:+z.2f} {high:+z.2f}"

    return [
        *(
            Column(quantity.name, quantity.short, plain=partial(cell, quantity))
            for quantity in measured_quantities(rows, QUANTITIES)
        ),
        text_column("cosines", "cos 5–95 %", cosines),
    ]


def _notes(view: View) -> Sequence[str]:
    columns = inspected(view).select("row", "method", "factor.texts", "train_length")
    score, method, texts, length = columns.row(0)
    return (f"{score}, {method or UNMODIFIED}: {texts}, trained at {length:,}",)


def _in_short(view: View) -> Sequence[str]:
    rows = inspected(view)
    names, (layer, head) = layers(rows), sharpest(rows)
    share = by_head(rows, "entropy_share", layer)[head]
    largest = {n: float(np.max(by_head(rows, "largest", n))) for n in names}
    highest = max(largest, key=largest.__getitem__)
    return (
        f"The sharpest head is head {head} of {names[layer]}: its entropy is {share:.0%} of ln n.",
        f"The largest logit is {largest[highest]:.3g}, in {names[highest]}.",
    )


# Figures


def figures(view: View) -> list[Figure]:
    """Grids of layers and heads, curves over position and training, single heads."""
    score, method, texts = inspected(view).select("row", "method", "factor.texts").row(0)
    name = f"{score} with {method}" if method else score
    rows, steps = inspected(view), view.frame.filter(protocol=TRAINING)
    return [
        *_layer_grids(rows, f"Attention of {name}: {texts}"),
        _position_figure(rows, f"Attention by position, {name}: {texts}"),
        _step_figure(steps, f"Attention while {name} trained"),
        *_head_figures(view.frame.filter(protocol=DRAWN), layers(rows), name),
    ]


def _layer_grids(rows: pl.DataFrame, title: str) -> Iterator[Figure]:
    """A grid of layers and heads for each quantity that is not 0 everywhere, as `layers_NAME`.

    Values are means over all queries of the texts; for largest logits, the maximum.
    """
    names = layers(rows)
    for quantity in measured_quantities(rows, [q for q in QUANTITIES if q.grid]):
        values = [by_head(rows, quantity.name, layer) for layer in names]
        width = max(map(len, values))
        cells = [[float(v) if math.isfinite(v) else None for v in line] for line in values]
        padded = tuple((*line, *(None,) * (width - len(line))) for line in cells)
        largest = max((v for line in padded for v in line if v is not None), default=0.0)
        digits = 3 if largest < 0.1 else 2 if largest < 10 else 1
        form = f".{digits}f" if len(padded) * width <= NUMBERS else ""
        texts = [[f"{v:{form}}" if form and v is not None else "" for v in line] for line in padded]
        heads = tuple(map(str, range(width)))
        yield Grid(
            f"layers_{quantity.name}",
            f"{title}: {quantity.title}",
            tuple(name.removeprefix("layer ") for name in names.values()),
            *(heads, padded, tuple(map(tuple, texts)), "head", "layer", quantity.title),
        )


def _position_figure(rows: pl.DataFrame, title: str) -> Figure:
    """A line for each layer over the position of the query (for ‖k‖, of the key).

    Values are means over a layer's heads; for largest logits, the maximum.
    """
    bins = rows.filter(axis="position").select("bin", "bin_end").unique().sort("bin")
    centres = [(low + high) / 2 for low, high in bins.rows()]

    def values(quantity: Quantity, layer: int) -> Sequence[tuple[float, Array]]:
        grid = by_position(rows, quantity.name, layer)
        return list(zip(centres, grid.T, strict=True)) if np.isfinite(grid).any() else ()

    shown = [quantity for quantity in QUANTITIES if quantity.by_position]
    panels = _panels(shown, layers(rows), values, "position of the query")
    return Curves("positions", title, panels if len(centres) >= 3 else (), shared_y=False)


def _step_figure(rows: pl.DataFrame, title: str) -> Figure:
    """A line for each layer over the training steps, before each step's update."""

    def values(quantity: Quantity, layer: int) -> Sequence[tuple[float, Array]]:
        lines = rows.filter(statistic=quantity.name, layer=layer).sort("bin", "head")
        steps = lines.group_by("bin", maintain_order=True)
        return [(float(step[0]), part["sum"].to_numpy()) for step, part in steps]

    shown = [quantity for quantity in QUANTITIES if quantity.by_step]
    several = rows["bin"].n_unique() > 1
    panels = _panels(shown, layers(rows), values, "step") if several else ()
    return Curves("training", title, panels, shared_y=False)


def _panels(
    quantities: Sequence[Quantity],
    names: Mapping[int, str],
    values: Callable[[Quantity, int], Sequence[tuple[float, Array]]],
    x_title: str,
) -> tuple[Panel, ...]:
    """A panel for each quantity that is not 0 everywhere, with a line for each layer.

    At most `MOST_LINES` layers are shown, evenly spaced, including the first and the last.
    """
    panels = []
    for quantity in quantities:
        lines = []
        for layer, name in names.items():
            points = [Point(x, over_heads(quantity, y)) for x, y in values(quantity, layer)]
            finite = tuple(point for point in points if math.isfinite(point.value))
            if finite:
                lines.append(Line(name, finite))
        if any(point.value for line in lines for point in line.points):
            indices = np.linspace(0, len(lines) - 1, min(len(lines), MOST_LINES)).round()
            shown = tuple(lines[int(index)] for index in indices)
            panels.append(Panel(quantity.title, shown, x_title, quantity.title))
    return tuple(panels)


def _head_figures(rows: pl.DataFrame, names: Mapping[int, str], name: str) -> Iterator[Figure]:
    """The attention of single heads (T, S) to one text: rows are queries, columns keys.

    The colour is √α, so that weak attention is visible.
    """
    heads = rows.select("layer", "head").unique().sort("layer", "head").rows()
    for layer, head in heads:
        cells = rows.filter(layer=layer, head=head).sort("unit", "bin")
        queries = cells.unique("unit", keep="first", maintain_order=True)[QUERY].to_list()
        keys = cells.unique("bin", keep="first", maintain_order=True)[KEY].to_list()
        colours = np.sqrt(cells["sum"].to_numpy()).reshape(len(queries), len(keys))
        yield Grid(
            "attention" if len(heads) == 1 else f"attention_{layer}_{head}",
            f"{name}: {names[layer]}, head {head}",
            tuple(map(_visible, queries)),
            tuple(map(_visible, keys)),
            tuple(map(tuple, colours.tolist())),
            tuple(("",) * len(keys) for _ in queries),
            *("key", "query", "√α"),
        )


def _visible(token: str) -> str:
    """A token in at most 10 visible characters: · is a space, ↵ a line break, → a tab."""
    text = token.replace(" ", "·").replace("\n", "↵").replace("\t", "→")
    return "".join(c if c.isprintable() else "?" for c in text)[:10]


STUDY = Study(
    "inspect",
    "What do the layers and heads of a trained model attend to?",
    title="What attention does",
    help="What the layers and heads of a trained model attend to.",
    tables=(
        Table(
            "table",
            "",
            _layer_rows,
            _layer_columns,
            notes=(
                "Means over a layer's heads and over all queries; of largest logits the maximum.",
                "Entropy: of attention, in nats; / ln n: as a share of the maximum (0: one key, 1: "
                "all keys alike). Largest: the largest logit of any visible pair.",
                "Token 0, sink: attention to the first token, and to a learned sink. Beyond L: to "
                "keys further away than the training length L. Unseen: attention weighted by the "
                "share of rotary pairs at angles that never occurred in training. ‖q‖, ‖k‖: norms "
                "before any normalisation.",
            ),
            head="layer",
        ),
    ),
    figures=figures,
    summary=_in_short,
    notes=_notes,
    made_by="normattn inspect RUN",
)
