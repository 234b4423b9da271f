"""The bootstrap: how a statistic varies with the choice of units.

A resample draws U units (documents, sentences, …) with replacement, as multinomial counts w rather
than copies: Σ_u w_u x_u. The draws depend only on U, so statistics of the same units have the same
draws, and differences are paired. All trainings share the units, so the draws are crossed
with the seeds, whose spread `estimate` adds.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Counts = NDArray[np.unsignedinteger[Any]]

RESAMPLES = 2000
DRAWN_AT_ONCE = 1 << 23
"""Counts (resamples × units) held as floats at a time: 64 MB."""
CACHED_COUNTS = 1 << 27
"""The largest number of counts, in bytes, that are cached."""


def resampled_sums(values: Array) -> Array:
    """Sums over units under every resample: (seeds, units, bins) → (resamples, seeds, bins)."""
    seeds, units, bins = values.shape
    flat = values.transpose(1, 0, 2).reshape(units, seeds * bins)
    draw = _cached_counts if RESAMPLES * units <= CACHED_COUNTS else _draw_counts
    parts = [part.astype(np.float64) @ flat for part in draw(RESAMPLES, units)]
    return np.concatenate(parts).reshape(RESAMPLES, seeds, bins)


@lru_cache(maxsize=4)
def _cached_counts(resamples: int, units: int) -> tuple[Counts, ...]:
    return tuple(_draw_counts(resamples, units))


def _draw_counts(resamples: int, units: int) -> Iterator[Counts]:
    """Yield chunks of counts (resamples, units): how often each unit is drawn.

    One generator draws all chunks in order, so their size does not change the counts.
    """
    generator = np.random.default_rng([0, 1, units])
    uniform = np.full(units, 1 / units)
    chunk = max(1, DRAWN_AT_ONCE // units)
    for start in range(0, resamples, chunk):
        counts = generator.multinomial(units, uniform, size=min(chunk, resamples - start))
        yield counts.astype(np.uint8 if counts.max() < 256 else np.uint32)
