"""Confidence intervals: resample documents (and seeds, where several were trained).

A statistic here is a ratio of sums, such as correct tokens over tokens. One resample draws D
documents and S seeds with replacement; every seed scores the same documents, so the two draws are
crossed and the ratio is

    sum_s v_s sum_d w_d numerator[s, d] / sum_s v_s sum_d w_d denominator[s, d],

with multinomial counts w and v in place of copies. The draws depend only on (seed, D, S), so two
rows that share documents and seeds also share their draws, and the interval of their difference is
paired. The interval runs between percentiles of the resampled statistic (Efron's percentile
interval); with two or three seeds it understates how much further seeds would vary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from normattn.errors import InputError

Array = NDArray[np.float64]

_DOCUMENTS, _SEEDS = 1, 2  # streams of the random generator


@dataclass(frozen=True)
class Bootstrap:
    """How intervals are made: the number of resamples, their seed and the level (0.95 = 95 %)."""

    resamples: int = 2000
    seed: int = 0
    level: float = 0.95

    def __post_init__(self) -> None:
        if self.resamples < 1:
            raise InputError(f"the bootstrap needs at least 1 resample, got {self.resamples}")
        if not 0 < self.level < 1:
            raise InputError(f"an interval's level lies between 0 and 1, got {self.level}")

    def samples(self, numerator: Array, denominator: Array) -> Array:
        """The ratio under every resample, shape (resamples, bins).

        `numerator` and `denominator` are sums of shape (seeds, documents, bins). A resample
        without any token in a bin gives NaN there.
        """
        above, below = self.sums(numerator), self.sums(denominator)
        return _divide(above, below)

    def interval(self, samples: Array) -> tuple[Array, Array]:
        """Lower and upper ends, shape (bins,), of samples (resamples, bins); NaNs are left out."""
        tail = 50 * (1 - self.level)
        known = ~np.all(np.isnan(samples), axis=0)
        ends = np.full((2, samples.shape[1]), np.nan)
        if known.any():
            ends[:, known] = np.nanpercentile(samples[:, known], [tail, 100 - tail], axis=0)
        return ends[0], ends[1]

    def sums(self, values: Array) -> Array:
        """The sums over documents and seeds under every resample, shape (resamples, bins).

        `values` are counts of shape (seeds, documents, bins). For statistics that are a function
        of several sums at once, such as BLEU.
        """
        seeds, documents, bins = values.shape
        drawn = _weights(self.resamples, self.seed, _DOCUMENTS, documents)
        flat = values.transpose(1, 0, 2).reshape(documents, seeds * bins)
        by_seed = (drawn @ flat).reshape(self.resamples, seeds, bins)
        if seeds == 1:
            return np.asarray(by_seed[:, 0])
        seed_weights = _weights(self.resamples, self.seed, _SEEDS, seeds)
        return np.asarray(np.einsum("rs,rsb->rb", seed_weights, by_seed))


def ratio(numerator: Array, denominator: Array) -> Array:
    """The plain ratio of sums over seeds and documents, shape (bins,)."""
    return _divide(numerator.sum(axis=(0, 1)), denominator.sum(axis=(0, 1)))


def _divide(above: Array, below: Array) -> Array:
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(below > 0, above / below, np.nan)


@lru_cache(maxsize=8)
def _weights(resamples: int, seed: int, stream: int, count: int) -> Array:
    """How often each of `count` units is drawn in each resample, shape (resamples, count)."""
    generator = np.random.default_rng([seed, stream, count])
    drawn = generator.multinomial(count, np.full(count, 1 / count), size=resamples)
    return drawn.astype(np.float64)
