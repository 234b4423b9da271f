"""What an inspection measured, as its tables and figures ask for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from normattn.lab.diagnostics.inspection import Array, by_head, by_position, cosine_counts
from normattn.lab.report.view import View
from normattn.lab.stats.metrics import crossing

KIND = "inspect"
TRAINING, DRAWN = "training", "drawn"
"""The protocols of a probed training, and of the attention of single heads to one text."""
QUERY, KEY = "factor.query", "factor.key"
"""The tokens of a pair of the text whose attention is drawn."""
SHARES = (0.05, 0.5, 0.95)


@dataclass(frozen=True)
class Quantity:
    """A statistic as it is shown: its title, a short one for the terminal, its digits."""

    name: str
    title: str
    short: str
    digits: int = 3


QUANTITIES = (
    Quantity("entropy", "entropy, nats", "entropy", 2),
    Quantity("entropy_share", "entropy / ln n", "/ ln n", 2),
    Quantity("largest", "largest logit", "largest", 1),
    Quantity("first_mass", "attention to the first token", "token\n0"),
    Quantity("sink_mass", "attention to the learned sink", "sink"),
    Quantity("beyond_mass", "attention at i − j ≥ L", "beyond\nL"),
    Quantity("angle_mass", "attention at unseen angles", "unseen"),
    Quantity("q_norm", "mean ‖q‖", "‖q‖", 1),
    Quantity("k_norm", "mean ‖k‖", "‖k‖", 1),
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


def inspected(view: View) -> pl.DataFrame:
    """The sums of the texts that were read."""
    return view.frame.filter(protocol=KIND)


def layers(view: View) -> dict[int, str]:
    """The layers, bottom first, and their short names."""
    return _named(inspected(view))


def _named(frame: pl.DataFrame) -> dict[int, str]:
    rows = frame.select("layer", "factor.layer").unique().sort("layer").rows()
    return dict(zip([n for n, _ in rows], layer_titles([name for _, name in rows]), strict=True))


def trained_layers(view: View) -> dict[int, str]:
    """The layers that were looked at while the model trained."""
    return _named(view.frame.filter(protocol=TRAINING))


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


def middles(view: View) -> list[float]:
    """The middle of each bin of the position."""
    bins = inspected(view).filter(axis="position").select("bin", "bin_end").unique().sort("bin")
    return [(low + high) / 2 for low, high in bins.rows()]


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
