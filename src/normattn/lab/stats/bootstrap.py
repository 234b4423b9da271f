"""Resampled units: how a statistic moves when the documents had been others.

A resample draws U units (documents, sentences, …) with replacement, as multinomial counts w in
place of copies: Σ_u w_u x_u. The draws depend only on (seed, U), so whatever shares its units also
shares its draws, and the spread of a difference is paired. Every seed of a training scores the
same units: the draws are crossed with the seeds, whose own spread `estimate` adds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from normattn.errors import InputError

Array = NDArray[np.float64]
Counts = NDArray[np.unsignedinteger[Any]]

DRAWN_AT_ONCE = 1 << 23
"""How many counts (resamples × units) are held as floating-point numbers at a time: 64 MB."""
KEPT_COUNTS = 1 << 27
"""How many counts, in bytes, are kept for the next call."""


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
        flat = values.transpose(1, 0, 2).reshape(units, seeds * bins)
        few = self.resamples * units <= KEPT_COUNTS
        drawn = _kept if few else _drawn
        parts = [part.astype(np.float64) @ flat for part in drawn(self.resamples, self.seed, units)]
        return np.concatenate(parts).reshape(self.resamples, seeds, bins)


@lru_cache(maxsize=4)
def _kept(resamples: int, seed: int, units: int) -> tuple[Counts, ...]:
    """The same counts as `_drawn`, ready for the next call."""
    return tuple(_drawn(resamples, seed, units))


def _drawn(resamples: int, seed: int, units: int) -> Iterator[Counts]:
    """How often each of `units` is drawn, some resamples after the other: (…, units).

    One generator draws them in order, so how many come at once changes no number.
    """
    generator = np.random.default_rng([seed, 1, units])
    even = np.full(units, 1 / units)
    at_once = max(1, DRAWN_AT_ONCE // units)
    for first in range(0, resamples, at_once):
        drawn = generator.multinomial(units, even, size=min(at_once, resamples - first))
        yield drawn.astype(np.uint8 if drawn.max() < 256 else np.uint32)
