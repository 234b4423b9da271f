"""Statistics as functions of summed counts: what a column shows.

A statistic names the rows of the frame that it reads and how their sums become a value. Whatever is
drawn by the bootstrap is added up first and becomes a value then, as the score of a corpus is
defined: a ratio, BLEU, chrF, F1 and a quantile are all made so. Of several seeds, which are several
models, it is the mean of their values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from normattn.lab.stats.counts import bleu, chrf, macro_f1

Array = NDArray[np.float64]
Value = Callable[[Array, Array, Array, Array], Array]
"""(sum, of, whole sum, whole of), each (…, bins) → (…): `whole` are the sums of all units."""


@dataclass(frozen=True)
class Statistic:
    """One column's number.

    `name` is the frame's statistic, `unit` what follows the number ("%", "nats"), `digits` those
    after the point.
    """

    name: str
    title: str
    value: Value
    unit: str = ""
    digits: int = 1

    def titled(self, title: str) -> Statistic:
        """The same under another title."""
        return replace(self, title=title)


def ratio(scale: float = 1.0) -> Value:
    """scale · Σ sum / Σ of over all bins; NaN where nothing was counted."""

    def value(above: Array, below: Array, *whole: Array) -> Array:
        return _divided(scale * above.sum(-1), below.sum(-1))

    return value


def mean_of_bins(above: Array, below: Array, *whole: Array) -> Array:
    """The mean over bins (layers, heads) of sum/of."""
    return np.asarray(_divided(above, below).mean(-1))


def quantile(share: float, edges: tuple[float, float]) -> Value:
    """The `share` quantile of a histogram over the bins, which cut `edges` evenly.

    Linear within a bin.
    """

    def value(above: Array, below: Array, *whole: Array) -> Array:
        return crossing(above, share, edges)

    return value


def crossing(counts: Array, share: float, edges: tuple[float, float]) -> Array:
    """Where the cumulative counts (…, bins) over `edges` reach `share`, linear within a bin."""
    bins = counts.shape[-1]
    shares = _divided(counts.cumsum(-1), counts.sum(-1, keepdims=True))
    index = np.minimum((shares < share).sum(-1), bins - 1)
    upper = np.take_along_axis(shares, index[..., None], -1)[..., 0]
    before = np.take_along_axis(shares, np.maximum(index - 1, 0)[..., None], -1)[..., 0]
    lower = np.where(index > 0, before, 0.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        inside = np.where(upper > lower, (share - lower) / (upper - lower), 0.5)
    low, high = edges
    return np.asarray(low + (high - low) * (index + np.clip(inside, 0, 1)) / bins)


def median(scale: float = 1.0) -> Value:
    """scale · the median of the bins' own sum/of, a bin counting as often as it was drawn.

    For units that are bins too (`Sums.by_unit`): a median is no function of summed counts.
    """

    def value(above: Array, below: Array, whole_above: Array, whole_below: Array) -> Array:
        ratios = np.broadcast_to(scale * whole_above / whole_below, below.shape)
        order = np.argsort(ratios, -1, kind="stable")
        ordered, drawn = (np.take_along_axis(part, order, -1) for part in (ratios, below))
        reached, count = drawn.cumsum(-1), drawn.sum(-1, keepdims=True)
        middle = [
            np.take_along_axis(ordered, (reached < rank).sum(-1, keepdims=True), -1)[..., 0]
            for rank in (np.floor((count + 1) / 2), np.floor(count / 2) + 1)
        ]
        return np.asarray((middle[0] + middle[1]) / 2)

    return value


def _divided(above: Array, below: Array) -> Array:
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(below > 0, above / below, np.nan)


def accuracy(title: str = "accuracy", name: str = "accuracy") -> Statistic:
    """Correct predictions of all, in %."""
    return Statistic(name, title, ratio(100.0), "%", 1)


def loss(title: str = "loss", name: str = "loss", digits: int = 3) -> Statistic:
    """Nats per prediction."""
    return Statistic(name, title, ratio(), "nats", digits)


def mean(name: str, title: str, digits: int = 2) -> Statistic:
    """A plain mean: Σ sum / Σ of."""
    return Statistic(name, title, ratio(), "", digits)


BLEU = Statistic("bleu", "BLEU", lambda above, below, *whole: bleu(above), "", 1)
CHRF = Statistic("chrf", "chrF", lambda above, below, *whole: chrf(above), "", 1)
MICRO_F1 = Statistic("f1", "micro F1", ratio(100.0), "%", 2)
"""Over bins of classes, sum = 2 · rightly predicted, of = predicted + true."""
MACRO_F1 = Statistic("f1", "macro F1", macro_f1, "%", 2)
