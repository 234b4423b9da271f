"""Training batches of text: windows of tokens, plain, tiled or masked.

A batch is a pure function of (seed, step), with no state. So a resumed run and another number of
processes see the same tokens. Random numbers come from Philox, a counter-based generator, so step
1,000,000 costs as much as step 0. Only its raw 64-bit words are used: numpy promises not to change
them, unlike its distributions. Source: Salmon et al., "Parallel random numbers", SC 2011.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float64, Int64
from pydantic import Field, model_validator

from normattn.errors import InputError
from normattn.lab.data.tokeniser import SEPARATOR_ID
from normattn.lab.data.tokens import Tiling, TokenSplit
from normattn.settings import Settings

_MASK = (1 << 64) - 1
_MASKING_KEY = 0x6D61736B  # Windows and masks are drawn from different keys.


def uniforms(seed: int, step: int, rows: int, columns: int) -> Float64[np.ndarray, "rows columns"]:
    """Draw numbers in [0, 1) with 53 random bits, keyed by (seed, step)."""
    key = np.array([seed & _MASK, step & _MASK], dtype=np.uint64)
    raw = np.random.Philox(key=key, counter=0).random_raw(rows * columns)
    return ((raw >> np.uint64(11)) * 2.0**-53).reshape(rows, columns)


def scale_to_int(uniform: np.ndarray, bound: int | np.ndarray) -> Int64[np.ndarray, "*n"]:
    """Map u in [0, 1) to an integer in [0, bound). The bias is below bound / 2^53."""
    # u·bound can round up to bound itself if bound is huge.
    return np.minimum((uniform * bound).astype(np.int64), np.asarray(bound, dtype=np.int64) - 1)


def epoch_order(seed: int, epoch: int, items: int, batches: int = 0) -> list[np.ndarray]:
    """Return a permutation of an epoch's items and one of its batches, keyed by (seed, epoch)."""
    drawn = uniforms(seed, epoch, items + batches, 1)[:, 0]
    return [np.argsort(keys, kind="stable") for keys in np.split(drawn, [items])]


def pad_rows(
    rows: Sequence[Sequence[int] | np.ndarray], pad_id: int, length: int | None = None
) -> tuple[Int64[np.ndarray, "b t"], Bool[np.ndarray, "b t"]]:
    """Pad rows of ids on the right to `length` (default: the longest). True marks padding."""
    lengths = np.array([len(row) for row in rows])
    length = int(lengths.max()) if length is None else length
    padding = np.arange(length) >= lengths[:, None]
    ids = np.full((len(rows), length), pad_id, dtype=np.int64)
    ids[~padding] = np.concatenate([np.asarray(row, dtype=np.int64) for row in rows])
    return ids, padding


def check_shards(batch_size: int, kind: str, shards: int) -> None:
    """Raise `InputError` if a batch of `batch_size` items does not divide into equal shards."""
    if batch_size % shards:
        raise InputError(
            f"a batch of {batch_size} {kind} does not divide into {shards} micro-batches "
            f"(processes × accumulate); take a multiple of {shards}"
        )


@dataclass(frozen=True)
class TrainingBatches:
    """Batches of `batch_size` rows of `length` + 1 tokens: inputs and their next tokens.

    A row is a window at a uniformly drawn position of the split. It may cross documents; attention
    sees across separators. With probability `tiling.fraction` it instead repeats a segment of
    uniform length and position. Raises `InputError` for a split or `length` that is too short.
    """

    split: TokenSplit
    length: int
    batch_size: int
    seed: int
    tiling: Tiling | None = None

    def __post_init__(self) -> None:
        split, length, tiling = self.split, self.length, self.tiling
        if tiling is not None and tiling.fraction > 0 and tiling.high > length:
            raise InputError(
                f"tiled segments of up to {tiling.high} tokens do not repeat in a sequence of "
                f"{length}: lower data.tiled_high to the length, or use longer sequences"
            )
        if split.total < length + 1:
            raise InputError(
                f"the {split.name} split is too small for one sequence: it has {split.total:,} "
                f"tokens and {length + 1:,} are needed; use more text or a shorter length"
            )

    def batch(self, step: int, shard: int = 0, shards: int = 1) -> Int64[np.ndarray, "rows t1"]:
        """Return shard `shard` of `shards` of the batch of `step`: consecutive rows."""
        check_shards(self.batch_size, "sequences", shards)
        count = self.batch_size // shards
        drawn = uniforms(self.seed, step, self.batch_size, 3)[shard * count : (shard + 1) * count]
        periods = np.full(len(drawn), self.length + 1, dtype=np.int64)
        if self.tiling is not None:
            tiled = drawn[:, 0] < self.tiling.fraction
            offsets = scale_to_int(drawn[:, 1], self.tiling.high - self.tiling.low + 1)
            periods = np.where(tiled, self.tiling.low + offsets, periods)
        starts = scale_to_int(drawn[:, 2], self.split.total - periods + 1)
        rows, columns = np.empty((count, self.length + 1), np.int64), np.arange(self.length + 1)
        for row, start, period in zip(rows, starts.tolist(), periods.tolist(), strict=True):
            segment = self.split.tokens[start : start + period]
            row[:] = segment if period > self.length else segment[columns % period]
        return rows


class MaskedRows(NamedTuple):
    """Rows with masked tokens.

    `ids` (rows, length): the model's input. `positions` (rows, chosen): the positions to predict,
    ascending. `targets` (rows, chosen): the original tokens there.
    """

    ids: Int64[np.ndarray, "rows length"]
    positions: Int64[np.ndarray, "rows chosen"]
    targets: Int64[np.ndarray, "rows chosen"]


class Masking(Settings):
    """BERT's masking: a share of each row's tokens is predicted, and most of these are masked.

    In every row max(1, round(`share` · length)) tokens are chosen, separators last. A chosen token
    becomes the mask with probability `masked`, a random token other than the separator with
    probability `random`, and is unchanged otherwise. The mask's id is the size of the vocabulary:
    a masked model's embedding has one more row, so causal and masked models share their tokens on
    disk. Defaults: 0.15, 0.8, 0.1. Source: arXiv 1810.04805, section 3.1.
    """

    share: float = Field(default=0.15, gt=0, le=1)
    masked: float = Field(default=0.8, ge=0, le=1)
    random: float = Field(default=0.1, ge=0, le=1)

    @model_validator(mode="after")
    def _check_shares(self) -> Masking:
        if self.masked + self.random > 1:
            raise ValueError("masked and random are more than 1 together")
        return self

    def chosen(self, length: int) -> int:
        """Return how many tokens of a row of `length` are predicted."""
        return max(1, round(self.share * length))

    def rows(
        self, tokens: np.ndarray, vocab_size: int, seed: int, step: int = 0, first: int = 0
    ) -> MaskedRows:
        """Mask `tokens` (rows, length): rows `first`, `first` + 1, … of step `step`."""
        count, length = tokens.shape
        chosen = self.chosen(length)
        drawn = uniforms(seed ^ _MASKING_KEY, step, first + count, length + 2 * chosen)[first:]
        # Separators come last, so that they are chosen only if nothing else is left.
        order = np.argsort(drawn[:, :length] + (tokens == SEPARATOR_ID), axis=1, kind="stable")
        positions = np.sort(order[:, :chosen], axis=1)
        targets = np.take_along_axis(tokens, positions, 1)
        action, word = np.split(drawn[:, length:], 2, axis=1)
        random = 1 + scale_to_int(word, vocab_size - 1)
        unmasked = np.where(action < self.masked + self.random, random, targets)
        ids = tokens.copy()
        inputs = np.where(action < self.masked, vocab_size, unmasked)
        np.put_along_axis(ids, positions, inputs, 1)
        return MaskedRows(ids, positions, targets)


@dataclass(frozen=True)
class MaskedBatches:
    """Masked training batches: the windows of `batches`, with new masks at every step."""

    batches: TrainingBatches
    masking: Masking
    vocab_size: int

    def batch(self, step: int, shard: int = 0, shards: int = 1) -> MaskedRows:
        """Return shard `shard` of `shards` of the batch of `step`: consecutive rows."""
        tokens = self.batches.batch(step, shard, shards)
        first, seed = shard * len(tokens), self.batches.seed
        return self.masking.rows(tokens, self.vocab_size, seed, step, first)
