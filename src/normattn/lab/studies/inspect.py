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

KIND = "inspect"
TRAINING, DRAWN = "training", "drawn"
"""The protocols of a probed training, and of the attention of single heads to one text."""
QUERY, KEY = "factor.query", "factor.key"
"""The tokens of a pair of the text whose attention is drawn."""
SHARES = (0.05, 0.5, 0.95)


@dataclass(frozen=True)
class Quantity:
    """A statistic as it is shown: its title, a short one for the terminal, its digits.

    `grid`: drawn by layer and head; `placed`: by position; `trained`: by step of the training.
    """

    name: str
    title: str
    short: str
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
"""What stands in the table of layers, and in figures."""
NORMED = (
    Quantity("q_normed", "mean ‖q‖ after its norm", "‖N(q)‖", 1),
    Quantity("k_normed", "mean ‖k‖ after its norm", "‖N(k)‖", 1),
)
MORE = (
    *NORMED,
    Quantity("lse", "mean log-sum-exp", "log-sum-exp", 2),
    Quantity("beyond_share", "share of keys at i − j ≥ L", "keys beyond L"),
    Quantity("angle_share", "share of angles unseen", "angles unseen"),
)
"""What stands in the table of heads besides."""
COSINE = Quantity("cosine", "median of cos(q, k)", "cosine")

# What was measured


def inspected(view: View) -> pl.DataFrame:
    """The sums of the texts that were read."""
    return view.frame.filter(protocol=KIND)


def layers(rows: pl.DataFrame) -> dict[int, str]:
    """The layers of some rows, bottom first, and their short names."""
    found = rows.select("layer", "factor.layer").unique().sort("layer").rows()
    return dict(zip([n for n, _ in found], layer_titles([name for _, name in found]), strict=True))


def layer_titles(names: Sequence[str]) -> list[str]:
    """Short names of layers: the parts of their paths that tell them apart, or just numbers."""
    paths = [name.split(".") for name in names]
    numbers = [[part for part in path if part.isdigit()] for path in paths]
    if all(len(own) == 1 for own in numbers) and len({own[0] for own in numbers}) == len(names):
        return [own[0] for own in numbers]
    dull = {"blocks", "mixer", "sublayer", "layers"}
    return [" ".join(part for part in path if part not in dull) or "0" for path in paths]


def told(view: View, quantities: Sequence[Quantity]) -> list[Quantity]:
    """Those that say something: within the training length nothing lies beyond it."""
    counted = inspected(view).filter(pl.col("of") > 0)
    rows = counted.group_by("statistic").agg((pl.col("sum") != 0).any().alias("any")).rows()
    known = {name for name, some in rows if some or not name.endswith("mass")}
    return [quantity for quantity in quantities if quantity.name in known]


def heads(view: View, quantity: str, layer: int) -> Array:
    """A quantity of each head over all positions; () where the layer has none."""
    return by_head(inspected(view), quantity, layer)


def positions(view: View, quantity: str, layer: int) -> Array:
    """A quantity by head and position; of `cosine` the median."""
    if quantity == "cosine":
        counts = cosine_counts(inspected(view), layer)
        median = crossing(counts, 0.5, (-1.0, 1.0))
        return np.where(counts.any(-1), median, np.nan)
    return by_position(inspected(view), quantity, layer)


def cosines(view: View, layer: int) -> Array:
    """By head the least cosine, three quantiles and the largest, (heads, 5); () for none."""
    counts = cosine_counts(inspected(view), layer).sum(1)
    if not len(counts):
        return np.zeros((0, 2 + len(SHARES)))
    ends = [heads(view, name, layer) for name in ("least_cosine", "largest_cosine")]
    middle = [crossing(counts, share, (-1.0, 1.0)) for share in SHARES]
    return np.stack([ends[0], *middle, ends[1]], -1)


def over_heads(quantity: str, values: Array) -> float:
    """The mean over a layer's heads, or the largest of largest logits; NaN for none."""
    known = values[np.isfinite(values)]
    if not len(known):
        return float("nan")
    return float(known.max() if quantity == "largest" else known.mean())


# Tables


def _number(
    key: str, title: str, digits: int, value: Callable[[View, int, Row], float | None]
) -> Column:
    """A column of numbers without an interval; `value` is given the row's layer."""

    def estimated(view: View, row: Row) -> Estimate | None:
        number = value(view, row.where["layer"], row)
        known = number is not None and math.isfinite(number)
        return Estimate(number, units=1) if known else None  # type: ignore[arg-type]

    return estimate_column(key, title, estimated, lambda known: f"{known.value:.{digits}f}")


def _of_layer(quantity: Quantity) -> Column:
    name = quantity.name
    return _number(
        *(name, quantity.short, quantity.digits),
        lambda view, layer, row: over_heads(name, heads(view, name, layer)),
    )


def _of_head(quantity: Quantity) -> Column:
    """The number of a query head; of keys that of the key head which it reads."""

    def value(view: View, layer: int, row: Row) -> float | None:
        values = heads(view, quantity.name, layer)
        if not len(values):
            return None
        shared = len(heads(view, "entropy", layer)) // len(values)
        return float(values[row.where["head"] // shared])

    return _number(quantity.name, quantity.title, quantity.digits, value)


def _cosine(index: int, name: str) -> Column:
    def value(view: View, layer: int, row: Row) -> float | None:
        percentiles = cosines(view, layer)
        return float(percentiles[row.where["head"], index]) if len(percentiles) else None

    return _number(f"cosine_{name.rstrip('%')}", f"cosine, {name}", 2, value)


def _cosine_range(view: View, row: Row) -> str | None:
    """From the 5th to the 95th percentile, the mean over heads of each."""
    percentiles = cosines(view, row.where["layer"])
    low, high = (over_heads("cosine", percentiles[:, index]) for index in (1, 3))
    return f"{low:+z.2f} {high:+z.2f}" if math.isfinite(low) else None


def _head_rows(view: View) -> list[Row]:
    return [
        Row(f"{title}, head {head}", {"layer": layer, "head": head})
        for layer, title in layers(inspected(view)).items()
        for head in range(len(heads(view, "entropy", layer)))
    ]


def _head_columns(view: View) -> list[Column]:
    names = ("least", *(f"{share:.0%}" for share in SHARES), "largest")
    return [
        *map(_of_head, told(view, (*QUANTITIES, *MORE))),
        *(_cosine(index, name) for index, name in enumerate(names)),
    ]


def _read(view: View) -> Sequence[str]:
    """What was read, by which model."""
    said = inspected(view).select("row", "method", "factor.texts", "train_length").row(0)
    score, method, texts, length = said
    return (f"{score}, {method or 'as is'}: {texts}, trained at {length:,}",)


# Figures

NUMBERS = 260
"""Cells of a grid that have a number each."""
MOST_LINES = 12


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


def _by_layer(view: View, title: str) -> Iterator[Figure]:
    """Cells layer × head of everything that is not 0 everywhere, as `layers_FIELD`.

    Means over all queries of the texts; the largest logit is that of any visible pair.
    """
    titles = layers(inspected(view))
    for quantity in told(view, [quantity for quantity in QUANTITIES if quantity.grid]):
        values = [heads(view, quantity.name, layer) for layer in titles]
        width = max(map(len, values))
        rows = tuple(_filled(line, width) for line in values)
        most = max((value for row in rows for value in row if value is not None), default=0.0)
        digits = 3 if most < 0.1 else 2 if most < 10 else 1
        numbers = len(rows) * width <= NUMBERS
        texts = tuple(
            tuple(f"{v:.{digits}f}" if numbers and v is not None else "" for v in row)
            for row in rows
        )
        yield Grid(
            f"layers_{quantity.name}",
            f"{title}: {quantity.title}",
            tuple(titles.values()),
            tuple(map(str, range(width))),
            *(rows, texts, "head", "layer", quantity.title),
        )


def _filled(values: Array, width: int) -> tuple[float | None, ...]:
    """One value for every head of the widest layer."""
    known = [float(value) if math.isfinite(value) else None for value in values]
    return (*known, *(None,) * (width - len(known)))


def _by_position(view: View, title: str) -> Figure:
    """A line per layer over the query's position (of ‖k‖ the key's), as `positions`.

    The mean over a layer's heads, for the largest logit the largest.
    """
    bins = inspected(view).filter(axis="position").select("bin", "bin_end").unique().sort("bin")
    places = [(low + high) / 2 for low, high in bins.rows()]
    shown = [*(quantity for quantity in QUANTITIES if quantity.placed), *NORMED, COSINE]

    def values(quantity: str, layer: int) -> Sequence[tuple[float, Array]]:
        grid = positions(view, quantity, layer)
        known = grid[np.isfinite(grid)]
        # A unit vector's norm is no news at any position.
        flat = quantity.endswith("normed") and len(known) and np.ptp(known) < 1e-3 * known.max()
        return list(zip(places, grid.T, strict=True)) if len(known) and not flat else ()

    panels = _panels(shown, layers(inspected(view)), values, "position of the query")
    return Curves("positions", title, panels if len(places) >= 3 else (), shared_y=False)


def _by_step(view: View, title: str) -> Figure:
    """A line per layer over the steps of a training, before each step's update, as `training`."""
    trained = view.frame.filter(protocol=TRAINING)

    def values(quantity: str, layer: int) -> Sequence[tuple[float, Array]]:
        lines = trained.filter(statistic=quantity, layer=layer).sort("bin", "head")
        return [
            (float(step[0]), part["sum"].to_numpy())
            for step, part in lines.group_by("bin", maintain_order=True)
        ]

    shown = [quantity for quantity in QUANTITIES if quantity.trained]
    several = trained["bin"].n_unique() > 1
    panels = _panels(shown, layers(trained), values, "step") if several else ()
    return Curves("training", title, panels, shared_y=False)


def _panels(
    quantities: Sequence[Quantity],
    names: Mapping[int, str],
    values: Callable[[str, int], Sequence[tuple[float, Array]]],
    x_title: str,
) -> tuple[Panel, ...]:
    """A panel for each quantity that is not 0 everywhere, a line for each layer.

    Of many layers 12 are shown, evenly chosen, the first and the last among them.
    """
    panels = []
    for quantity in quantities:
        lines = []
        for layer, name in names.items():
            of_layer = values(quantity.name, layer)
            points = [Point(x, over_heads(quantity.name, y)) for x, y in of_layer]
            known = tuple(point for point in points if math.isfinite(point.value))
            if known:
                lines.append(Line(name, known))
        if any(point.value for line in lines for point in line.points):
            few = min(len(lines), MOST_LINES)
            places = np.linspace(0, len(lines) - 1, few).round().astype(int)
            shown = tuple(lines[index] for index in places)
            panels.append(Panel(quantity.title, shown, x_title, quantity.title))
    return tuple(panels)


def _heads(view: View, name: str) -> Iterator[Figure]:
    """The attention of single heads (T, S) to one text: rows are queries, columns keys.

    The colour is √α, so that weak attention shows; · stands for a space, ↵ for a line's end.
    """
    drawn = view.frame.filter(protocol=DRAWN)
    places = drawn.select("layer", "head").unique().sort("layer", "head").rows()
    titles = layers(inspected(view))
    for layer, head in places:
        cells = drawn.filter(layer=layer, head=head).sort("unit", "bin")
        queries = cells.unique("unit", keep="first", maintain_order=True)[QUERY].to_list()
        keys = cells.unique("bin", keep="first", maintain_order=True)[KEY].to_list()
        colours = np.sqrt(cells["sum"].to_numpy()).reshape(len(queries), len(keys))
        yield Grid(
            "attention" if len(places) == 1 else f"attention_{layer}_{head}",
            f"{name}: layer {titles[layer]}, head {head}",
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
            lambda view: [Row(t, {"layer": n}) for n, t in layers(inspected(view)).items()],
            lambda view: [
                *map(_of_layer, told(view, QUANTITIES)),
                text_column("cosines", "cos 5–95 %", _cosine_range),
            ],
            notes=(
                "means over the heads of a layer and the queries of all texts, of largest logits "
                "the largest.",
                "entropy: of attention, in nats; / ln n: 0 looks at one key, 1 at all alike. "
                "largest: the largest logit of any visible pair.",
                "token 0, sink: attention to the first token, and to a learned sink. beyond L: to "
                "keys at i − j ≥ L, the training length. unseen: attention times the share of "
                "rotary feature pairs at an angle which training never had. ‖q‖, ‖k‖: norms as the "
                "projections give them.",
            ),
            head="layer",
        ),
        Table(
            "heads",
            "Every head",
            _head_rows,
            _head_columns,
            notes=(
                "norms of keys: those of the key head that a query head reads. Numbers by position "
                "are in measurements.parquet.",
            ),
            head="head",
        ),
    ),
    figures=figures,
    notes=_read,
    made_by="normattn inspect RUN",
)
