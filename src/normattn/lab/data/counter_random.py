"""Random numbers that are a pure function of a seed and a step, for ever.

Philox is a counter: its output for a key needs no history, so step 1,000,000 costs what step 0
does and a resumed run draws what an unbroken one draws. Only the raw 64-bit words are used, which
numpy promises not to change; its distributions carry no such promise.
Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64, Int64

_MASK = (1 << 64) - 1


def uniforms(seed: int, step: int, rows: int, columns: int) -> Float64[np.ndarray, "rows columns"]:
    """Numbers in [0, 1) with 53 random bits, keyed by (seed, step)."""
    key = np.array([seed & _MASK, step & _MASK], dtype=np.uint64)
    raw = np.random.Philox(key=key, counter=0).random_raw(rows * columns)
    return ((raw >> np.uint64(11)) * 2.0**-53).reshape(rows, columns)


def below(uniform: Float64[np.ndarray, "n"], bound: int | np.ndarray) -> Int64[np.ndarray, "n"]:
    """Map u in [0, 1) to an integer in [0, bound); the bias is below bound / 2^53."""
    # u·bound can round up to bound itself when bound is huge.
    return np.minimum((uniform * bound).astype(np.int64), np.asarray(bound, dtype=np.int64) - 1)
