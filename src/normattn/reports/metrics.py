"""The statistics of the tables: what is divided by what, and its estimate with an interval."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from normattn.errors import InputError
from normattn.reports.bootstrap import Bootstrap, ratio
from normattn.reports.cells import Cell

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Metric:
    """One column: a protocol, a ratio of sums, and how it is spoken of.

    `scale` is 100 for accuracies (percent) and 1 for losses (nats per token).
    """

    key: str
    title: str
    phrase: str
    protocol: str
    above: str = "correct"
    below: str = "tokens"
    scale: float = 100.0


def _columns() -> dict[str, Metric]:
    accuracies = (
        Metric("train", "train length", "at the training length", "train_length"),
        Metric("repeated", "repeated", "on repeated text", "repeated"),
        Metric(
            *("repeated_seen", "repeated, answer seen earlier"),
            *("on repeated text whose answer stands earlier", "repeated"),
            *("seen_correct", "seen_tokens"),
        ),
        Metric("non_repeated", "non-repeated", "on non-repeated text", "non_repeated"),
        Metric(
            *("last_segment", "last segment, longest context"),
            *("on the last segment with the longest context", "last_segment"),
        ),
    )
    losses = tuple(
        Metric(
            *(f"{m.key}_loss", f"{m.title}: loss", f"in loss {m.phrase}", m.protocol),
            *("loss", "tokens", 1.0),
        )
        for m in accuracies
        if m.below == "tokens"
    )
    return {metric.key: metric for metric in (*accuracies, *losses)}


METRICS: Mapping[str, Metric] = MappingProxyType(_columns())
"""Every ratio by its key in table.json; the extrapolation tax, a difference, is not among them."""

TAX = Metric("tax", "tax", "at the training length", "train_length")
"""The statistic whose paired difference is the extrapolation tax."""


@dataclass(frozen=True)
class Estimate:
    """A value, the ends of its interval, and the documents, tokens and seeds behind it.

    `low` and `high` are None where no interval can be made (a single document). `tokens` counts
    the scored tokens of the set, once for all seeds.
    """

    value: float
    low: float | None
    high: float | None
    documents: int
    tokens: int
    seeds: int

    @property
    def above_zero(self) -> bool:
        """Whether the whole interval lies above 0."""
        return self.low is not None and self.low > 0

    @property
    def below_zero(self) -> bool:
        """Whether the whole interval lies below 0."""
        return self.high is not None and self.high < 0

    def as_json(self) -> dict[str, float | int | None]:
        """The six fields of a metric in table.json."""
        return {
            "value": self.value,
            "low": self.low,
            "high": self.high,
            "documents": self.documents,
            "tokens": self.tokens,
            "seeds": self.seeds,
        }


def estimate(cell: Cell, metric: Metric, bootstrap: Bootstrap) -> Estimate | None:
    """A metric over all bins of a cell; None where it has no token to count."""
    above, below = (_total(cell.sums[field]) for field in (metric.above, metric.below))
    value = float(ratio(above, below)[0]) * metric.scale
    if math.isnan(value):
        return None
    samples = bootstrap.samples(above, below) * metric.scale
    return _estimate(value, samples, cell, metric, bootstrap)


def curve(cell: Cell, metric: Metric, bootstrap: Bootstrap) -> tuple[Array, Array, Array]:
    """A metric by position bin: values, lower ends, upper ends, each of shape (bins,)."""
    above, below = cell.sums[metric.above], cell.sums[metric.below]
    values = ratio(above, below) * metric.scale
    if len(cell.documents) == 1:
        return values, values, values
    low, high = bootstrap.interval(bootstrap.samples(above, below) * metric.scale)
    return values, low, high


def difference(a: Cell, b: Cell, metric: Metric, bootstrap: Bootstrap) -> Estimate:
    """The metric of `a` minus that of `b`, paired over the documents and seeds that both have.

    Raises `InputError` when the cells were evaluated on different sets or share no seed.
    """
    if a.data != b.data or a.documents != b.documents:
        raise InputError(
            f"{a.row.name} and {b.row.name} were evaluated on different {a.protocol} sets; "
            "evaluate both on one set to compare them"
        )
    seeds = sorted(set(a.seeds) & set(b.seeds))
    if not seeds:
        raise InputError(
            f"{a.row.name} (seeds {_list(a.seeds)}) and {b.row.name} (seeds {_list(b.seeds)}) "
            "share no seed, so they cannot be paired"
        )
    a, b = a.only_seeds(seeds), b.only_seeds(seeds)
    sums = [[_total(cell.sums[field]) for field in (metric.above, metric.below)] for cell in (a, b)]
    value = float(ratio(*sums[0])[0] - ratio(*sums[1])[0]) * metric.scale
    samples = (bootstrap.samples(*sums[0]) - bootstrap.samples(*sums[1])) * metric.scale
    return _estimate(value, samples, a, metric, bootstrap)


def _estimate(
    value: float, samples: Array, cell: Cell, metric: Metric, bootstrap: Bootstrap
) -> Estimate:
    low: float | None = None
    high: float | None = None
    if len(cell.documents) > 1:
        ends = bootstrap.interval(samples)
        low, high = _clean(ends[0][0]), _clean(ends[1][0])
    return Estimate(
        value=_clean(value),
        low=low,
        high=high,
        documents=len(cell.documents),
        tokens=round(float(cell.sums[metric.below][0].sum())),
        seeds=len(cell.seeds),
    )


def _clean(value: float) -> float:
    # Far below any interval's width, and above what the order of a sum can change.
    return round(float(value), 9) + 0.0


def _total(values: Array) -> Array:
    return np.asarray(values.sum(axis=2, keepdims=True))


def _list(values: tuple[int, ...]) -> str:
    return ", ".join(str(value) for value in values)
