"""Training batches: windows at random places of the packed tokens, some of them tiled.

A batch is a pure function of (seed, step): nothing is shuffled, stored or advanced, so a resumed
run, another number of processes or another order of asking all see the same tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64

from normattn.errors import InputError
from normattn.lab.data.counter_random import below, uniforms
from normattn.lab.data.token_data import TokenSplit


@dataclass(frozen=True)
class Tiling:
    """A share `fraction` of the rows is a segment of `low` … `high` tokens, repeated."""

    fraction: float
    low: int
    high: int

    def __post_init__(self) -> None:
        if not 0 <= self.fraction <= 1:
            raise InputError(f"the tiled fraction must lie in 0 … 1, got {self.fraction:g}")
        if not 1 <= self.low <= self.high:
            raise InputError(
                f"a tiled segment needs 1 ≤ low ≤ high, got low {self.low} and high {self.high}"
            )


class TrainingBatches:
    """Batches of `batch_size` rows of `length` + 1 tokens: inputs and their next tokens.

    A row is a window at a uniformly drawn place of all the split's tokens, whatever documents it
    crosses (attention reaches across separators), or, for a share `tiling.fraction` of the rows, a
    segment of uniformly drawn length and place that repeats to fill the row.
    Raises `InputError` when the split holds less than one row.
    """

    def __init__(
        self,
        split: TokenSplit,
        length: int,
        batch_size: int,
        seed: int,
        tiling: Tiling | None = None,
    ) -> None:
        if length < 1 or batch_size < 1:
            raise InputError(
                f"length and batch size must be at least 1, got {length} and {batch_size}"
            )
        if tiling is not None and tiling.fraction > 0 and tiling.high > length:
            raise InputError(
                f"tiled segments of up to {tiling.high} tokens do not repeat in a sequence of "
                f"{length}: tiled_high must be at most the length"
            )
        if split.total < length + 1:
            raise InputError(
                f"the {split.name} split is too small for one sequence: it has {split.total:,} "
                f"tokens and {length + 1:,} are needed; use more text or a shorter length"
            )
        self.split = split
        self.length = length
        self.batch_size = batch_size
        self.seed = seed
        self.tiling = tiling
        self._columns = np.arange(length + 1, dtype=np.int64)

    def batch(self, step: int, rank: int = 0, world: int = 1) -> Int64[np.ndarray, "rows length_1"]:
        """The rows of process `rank` of `world` at `step`: (batch_size / world, length + 1).

        The ranks' rows, in order, are the rows of the one batch that a single process draws.
        """
        if self.batch_size % world or not 0 <= rank < world:
            raise InputError(
                f"a batch of {self.batch_size} sequences cannot be shared by {world} processes "
                f"(rank {rank}): it must be a multiple of their number"
            )
        share = self.batch_size // world
        return self.rows(step, rank * share, (rank + 1) * share)

    def rows(self, step: int, start: int, stop: int) -> Int64[np.ndarray, "rows length_1"]:
        """Rows `start` … `stop` of the whole batch at `step`."""
        drawn = uniforms(self.seed, step, self.batch_size, 3)[start:stop]
        period = np.full(len(drawn), self.length + 1, dtype=np.int64)
        if self.tiling is not None:
            tiled = drawn[:, 0] < self.tiling.fraction
            drawn_period = below(drawn[:, 1], self.tiling.high - self.tiling.low + 1)
            period = np.where(tiled, self.tiling.low + drawn_period, period)
        first = below(drawn[:, 2], self.split.total - period + 1)
        rows = np.empty((len(drawn), self.length + 1), np.int64)
        for row, (start, size) in enumerate(zip(first.tolist(), period.tolist(), strict=True)):
            rows[row] = self.split.tokens[start : start + size][self._columns % size]
        return rows
