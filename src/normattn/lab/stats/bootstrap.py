"""Resampled units: how a statistic moves when the documents had been others.

A resample draws U units (documents, sentences, …) with replacement, as multinomial counts w in
place of copies: Σ_u w_u x_u. The draws depend only on (seed, U), so whatever shares its units also
shares its draws, and the spread of a difference is paired. Every seed of a training scores the
same units: the draws are crossed with the seeds, whose own spread `estimate` adds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from normattn.errors import InputError

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Bootstrap:
    """The number of resamples, their seed, and the level of intervals (0.95 = 95 %)."""

    resamples: int = 2000
    seed: int = 0
    level: float = 0.95

    def __post_init__(self) -> None:
        if self.resamples < 2:
            raise InputError(f"the bootstrap needs at least 2 resamples, got {self.resamples}")
        if not 0 < self.level < 1:
            raise InputError(f"an interval's level lies between 0 and 1, got {self.level}")

    def sums(self, values: Array) -> Array:
        """Sums over units under every resample: (seeds, units, bins) → (resamples, seeds, bins)."""
        seeds, units, bins = values.shape
        drawn = _weights(self.resamples, self.seed, units)
        flat = values.transpose(1, 0, 2).reshape(units, seeds * bins)
        return np.asarray((drawn @ flat).reshape(self.resamples, seeds, bins))


@lru_cache(maxsize=8)
def _weights(resamples: int, seed: int, count: int) -> Array:
    """How often each of `count` units is drawn in each resample, (resamples, count)."""
    generator = np.random.default_rng([seed, 1, count])
    drawn = generator.multinomial(count, np.full(count, 1 / count), size=resamples)
    return drawn.astype(np.float64)
