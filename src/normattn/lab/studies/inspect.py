"""What do the layers and heads of a trained model attend to?

`normattn inspect RUN` measures it: entropy, largest logits, sinks, norms and cosines of every
layer, head and position, while the model reads text held out from its training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from normattn.lab.diagnostics.inspection import Array, by_head, by_position, cosine_counts
from normattn.lab.report.figures import Curves, Figure, Grid, Line, Panel, Point
from normattn.lab.report.tables import Column, Row, Table, estimate_column, text_column
from normattn.lab.report.view import View
from normattn.lab.stats import Estimate
from normattn.lab.stats.metrics import crossing
from normattn.lab.studies.base import Study
from normattn.score.spec import UNMODIFIED

KIND = "inspect"
TRAINING, DRAWN = "training", "drawn"
"""The protocols of a probed training, and of the attention of single heads to one text."""
QUERY, KEY = "factor.query", "factor.key"
"""The tokens of a pair of the text whose attention is drawn."""
NUMBERS, MOST_LINES = 260, 12
"""Cells of a grid that have a number each, and lines of a panel, at most."""


@dataclass(frozen=True)
class Quantity:
    """A statistic and how it is shown: its title, a short one for the terminal, its digits.

    `grid`: drawn by layer and head; `placed`: by position; `trained`: by step of the training.
    """

    name: str
    title: str
    short: str = ""
    digits: int = 3
    grid: bool = False
    placed: bool = False
    trained: bool = False


QUANTITIES = (
    Quantity("entropy", "entropy, nats", "entropy", 2),
    Quantity("entropy_share", "entropy / ln n", "/ ln n", 2, True, True, True),
    Quantity("largest", "largest logit", "largest", 1, True, True, True),
    Quantity("first_mass", "attention to the first token", "token\n0", 3, True, True, True),
    Quantity("sink_mass", "attention to the learned sink", "sink", 3, True),
    Quantity("beyond_mass", "attention at i − j ≥ L", "beyond\nL", 3, True, True),
    Quantity("angle_mass", "attention at unseen angles", "unseen", 3, True),
    Quantity("q_norm", "mean ‖q‖", "‖q‖", 1, placed=True, trained=True),
    Quantity("k_norm", "mean ‖k‖", "‖k‖", 1, placed=True, trained=True),
)
"""The statistics in tables and figures; measurements.parquet has more."""

# What was measured


def inspected(view: View) -> pl.DataFrame:
    """The sums of the texts that were read."""
    return view.frame.filter(protocol=KIND)


def layers(rows: pl.DataFrame) -> dict[int, str]:
    """The layers of some rows, bottom first, and their names for people.

    "layer 3" where numbers distinguish them, else the parts of their paths that do, as
    "decoder 0 cross".
    """
    found = rows.select("layer", "factor.layer").unique().sort("layer").rows()
    paths = [name.split(".") for _, name in found]
    numbers = [tuple(part for part in path if part.isdigit()) for path in paths]
    if all(len(own) == 1 for own in numbers) and len(set(numbers)) == len(found):
        names = [f"layer {own[0]}" for own in numbers]
    else:
        dull = {"blocks", "mixer", "sublayer", "layers"}
        names = [" ".join(part for part in path if part not in dull) for path in paths]
    return {n: name or f"layer {n}" for (n, _), name in zip(found, names, strict=True)}


def _plain(name: str) -> str:
    """A layer's name under the heading "layer"."""
    return name.removeprefix("layer ")


def sharpest(rows: pl.DataFrame) -> tuple[int, int]:
    """The layer and the head with the least entropy against ln n."""
    shares = [
        (float(share), layer, head)
        for layer in layers(rows)
        for head, share in enumerate(by_head(rows, "entropy_share", layer))
        if np.isfinite(share)
    ]
    return min(shares)[1:] if shares else (0, 0)


def counted(rows: pl.DataFrame, quantities: Sequence[Quantity]) -> list[Quantity]:
    """Those that are not 0 everywhere: within the training length nothing is beyond it."""
    sums = rows.filter(pl.col("of") > 0).group_by("statistic")
    found = sums.agg((pl.col("sum") != 0).any().alias("any")).rows()
    known = {name for name, some in found if some or not name.endswith("mass")}
    return [quantity for quantity in quantities if quantity.name in known]


def over_heads(quantity: Quantity, values: Array) -> float:
    """The mean over a layer's heads, or the largest of largest logits; NaN for none."""
    known = values[np.isfinite(values)]
    if not len(known):
        return float("nan")
    return float(known.max() if quantity.name == "largest" else known.mean())


# Tables


def _of_layer(quantity: Quantity) -> Column:
    def value(rows: pl.DataFrame, layer: int, row: Row) -> float:
        return over_heads(quantity, by_head(rows, quantity.name, layer))

    return _number(quantity, quantity.short, value)


def _of_head(quantity: Quantity) -> Column:
    """The number of a query head; of keys that of the key head which it reads."""

    def value(rows: pl.DataFrame, layer: int, row: Row) -> float:
        values = by_head(rows, quantity.name, layer)
        if not len(values):
            return float("nan")
        shared = len(by_head(rows, "entropy", layer)) // len(values)
        return float(values[row.where["head"] // shared])

    return _number(quantity, quantity.title, value)


def _number(
    quantity: Quantity, title: str, value: Callable[[pl.DataFrame, int, Row], float]
) -> Column:
    """A column of numbers without an interval; `value` is given the row's layer."""

    def estimated(view: View, row: Row) -> Estimate | None:
        number = value(inspected(view), row.where["layer"], row)
        return Estimate(number, units=1) if math.isfinite(number) else None

    digits = quantity.digits
    return estimate_column(quantity.name, title, estimated, lambda one: f"{one.value:.{digits}f}")


def _cosine_range(view: View, row: Row) -> str | None:
    """From the 5th to the 95th percentile, the mean over heads of each."""
    counts = cosine_counts(inspected(view), row.where["layer"]).sum(1)
    if not counts.any():
        return None
    low, high = (crossing(counts, share, (-1.0, 1.0)).mean() for share in (0.05, 0.95))
    return f"{low:+z.2f} {high:+z.2f}"


def _layer_rows(view: View) -> list[Row]:
    names = layers(inspected(view))
    return [Row(_plain(name), {"layer": layer}) for layer, name in names.items()]


def _layer_columns(view: View) -> list[Column]:
    return [
        *map(_of_layer, counted(inspected(view), QUANTITIES)),
        text_column("cosines", "cos 5–95 %", _cosine_range),
    ]


def _head_rows(view: View) -> list[Row]:
    rows = inspected(view)
    return [
        Row(f"{name}, head {head}", {"layer": layer, "head": head})
        for layer, name in layers(rows).items()
        for head in range(len(by_head(rows, "entropy", layer)))
    ]


def _head_columns(view: View) -> list[Column]:
    return [*map(_of_head, counted(inspected(view), QUANTITIES))]


def _read(view: View) -> Sequence[str]:
    """What was read, by which model."""
    said = inspected(view).select("row", "method", "factor.texts", "train_length").row(0)
    score, method, texts, length = said
    return (f"{score}, {method or UNMODIFIED}: {texts}, trained at {length:,}",)


def _in_short(view: View) -> Sequence[str]:
    """The sharpest head and the largest logit of all layers."""
    rows = inspected(view)
    names, (layer, head) = layers(rows), sharpest(rows)
    share = by_head(rows, "entropy_share", layer)[head]
    largest = {n: float(np.max(by_head(rows, "largest", n))) for n in names}
    most = max(largest, key=largest.__getitem__)
    return (
        f"The sharpest head is head {head} of {names[layer]}: its entropy is {share:.0%} of ln n.",
        f"The largest logit is {largest[most]:.3g}, in {names[most]}.",
    )


# Figures


def figures(view: View) -> list[Figure]:
    """Grids of layers and heads, curves over position and training, single heads."""
    score, method, texts = inspected(view).select("row", "method", "factor.texts").row(0)
    name = f"{score} with {method}" if method else score
    return [
        *_by_layer(inspected(view), f"Attention of {name}: {texts}"),
        _by_position(inspected(view), f"Attention by position, {name}: {texts}"),
        _by_step(view.frame.filter(protocol=TRAINING), f"Attention while {name} trained"),
        *_heads(view.frame.filter(protocol=DRAWN), layers(inspected(view)), name),
    ]


def _by_layer(rows: pl.DataFrame, title: str) -> Iterator[Figure]:
    """Cells layer × head of everything that is not 0 everywhere, as `layers_FIELD`.

    Means over all queries of the texts; the largest logit is that of any visible pair.
    """
    names = layers(rows)
    for quantity in counted(rows, [quantity for quantity in QUANTITIES if quantity.grid]):
        values = [by_head(rows, quantity.name, layer) for layer in names]
        width = max(map(len, values))
        cells = [[float(v) if math.isfinite(v) else None for v in line] for line in values]
        whole = tuple((*line, *(None,) * (width - len(line))) for line in cells)
        most = max((v for line in whole for v in line if v is not None), default=0.0)
        digits = 3 if most < 0.1 else 2 if most < 10 else 1
        numbers = len(whole) * width <= NUMBERS
        texts = tuple(
            tuple(f"{v:.{digits}f}" if numbers and v is not None else "" for v in line)
            for line in whole
        )
        yield Grid(
            f"layers_{quantity.name}",
            f"{title}: {quantity.title}",
            tuple(map(_plain, names.values())),
            tuple(map(str, range(width))),
            *(whole, texts, "head", "layer", quantity.title),
        )


def _by_position(rows: pl.DataFrame, title: str) -> Figure:
    """A line per layer over the query's position (of ‖k‖ the key's), as `positions`.

    The mean over a layer's heads, for the largest logit the largest.
    """
    bins = rows.filter(axis="position").select("bin", "bin_end").unique().sort("bin")
    places = [(low + high) / 2 for low, high in bins.rows()]

    def values(quantity: Quantity, layer: int) -> Sequence[tuple[float, Array]]:
        grid = by_position(rows, quantity.name, layer)
        return list(zip(places, grid.T, strict=True)) if np.isfinite(grid).any() else ()

    shown = [quantity for quantity in QUANTITIES if quantity.placed]
    panels = _panels(shown, layers(rows), values, "position of the query")
    return Curves("positions", title, panels if len(places) >= 3 else (), shared_y=False)


def _by_step(rows: pl.DataFrame, title: str) -> Figure:
    """A line per layer over the steps of a training, before each step's update, as `training`."""

    def values(quantity: Quantity, layer: int) -> Sequence[tuple[float, Array]]:
        lines = rows.filter(statistic=quantity.name, layer=layer).sort("bin", "head")
        return [
            (float(step[0]), part["sum"].to_numpy())
            for step, part in lines.group_by("bin", maintain_order=True)
        ]

    shown = [quantity for quantity in QUANTITIES if quantity.trained]
    several = rows["bin"].n_unique() > 1
    panels = _panels(shown, layers(rows), values, "step") if several else ()
    return Curves("training", title, panels, shared_y=False)


def _panels(
    quantities: Sequence[Quantity],
    names: Mapping[int, str],
    values: Callable[[Quantity, int], Sequence[tuple[float, Array]]],
    x_title: str,
) -> tuple[Panel, ...]:
    """A panel for each quantity that is not 0 everywhere, a line for each layer.

    Of many layers 12 are shown, evenly chosen, the first and the last among them.
    """
    panels = []
    for quantity in quantities:
        lines = []
        for layer, name in names.items():
            drawn = [Point(x, over_heads(quantity, y)) for x, y in values(quantity, layer)]
            known = tuple(point for point in drawn if math.isfinite(point.value))
            if known:
                lines.append(Line(name, known))
        if any(point.value for line in lines for point in line.points):
            few = np.linspace(0, len(lines) - 1, min(len(lines), MOST_LINES)).round().astype(int)
            shown = tuple(lines[index] for index in few)
            panels.append(Panel(quantity.title, shown, x_title, quantity.title))
    return tuple(panels)


def _heads(rows: pl.DataFrame, names: Mapping[int, str], name: str) -> Iterator[Figure]:
    """The attention of single heads (T, S) to one text: rows are queries, columns keys.

    The colour is √α, so that weak attention shows; · stands for a space, ↵ for a line's end.
    """
    places = rows.select("layer", "head").unique().sort("layer", "head").rows()
    for layer, head in places:
        cells = rows.filter(layer=layer, head=head).sort("unit", "bin")
        queries = cells.unique("unit", keep="first", maintain_order=True)[QUERY].to_list()
        keys = cells.unique("bin", keep="first", maintain_order=True)[KEY].to_list()
        colours = np.sqrt(cells["sum"].to_numpy()).reshape(len(queries), len(keys))
        yield Grid(
            "attention" if len(places) == 1 else f"attention_{layer}_{head}",
            f"{name}: {names[layer]}, head {head}",
            tuple(map(_shown, queries)),
            tuple(map(_shown, keys)),
            tuple(tuple(map(float, row)) for row in colours),
            tuple(("",) * len(keys) for _ in queries),
            *("key", "query", "√α"),
        )


def _shown(token: str) -> str:
    """A token as one short word of visible characters that the font has."""
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
                "Means over a layer's heads and over all queries; of largest logits the largest.",
                "entropy: of attention, in nats; / ln n: as a share of the maximum (0: one key, 1: "
                "all keys alike). largest: the largest logit of any visible pair.",
                "token 0, sink: attention to the first token, and to a learned sink. beyond L: to "
                "keys further away than the training length L. unseen: attention weighted by the "
                "share of rotary pairs at angles that never occurred in training. ‖q‖, ‖k‖: norms "
                "before any normalisation.",
            ),
            head="layer",
        ),
        Table(
            "heads",
            "Every head",
            _head_rows,
            _head_columns,
            notes=(
                "Norms of keys are those of the key head that a query head uses. Numbers by "
                "position are in measurements.parquet.",
            ),
            head="head",
        ),
    ),
    figures=figures,
    summary=_in_short,
    notes=_read,
    made_by="normattn inspect RUN",
)
