"""Training batches of text: windows of tokens, plain, tiled or masked.

A batch is a pure function of (seed, step): nothing is shuffled, stored or advanced, so a resumed
run, another number of processes or another order of asking all see the same tokens. Its random
numbers are Philox's, a counter: its output for a key needs no history, so step 1,000,000 costs
what step 0 does. Only the raw 64-bit words are used, which numpy promises not to change; its
distributions carry no such promise. Source: Salmon et al. 2011, "Parallel random numbers: as easy
as 1, 2, 3".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float64, Int64

from normattn.errors import InputError
from normattn.lab.data.tokeniser import SEPARATOR_ID
from normattn.lab.data.tokens import Tiling, TokenSplit

_MASK = (1 << 64) - 1
# Draws of the windows and of the masks come from different keys.
_MASKING = 0x6D61736B


def uniforms(seed: int, step: int, rows: int, columns: int) -> Float64[np.ndarray, "rows columns"]:
    """Numbers in [0, 1) with 53 random bits, keyed by (seed, step)."""
    key = np.array([seed & _MASK, step & _MASK], dtype=np.uint64)
    raw = np.random.Philox(key=key, counter=0).random_raw(rows * columns)
    return ((raw >> np.uint64(11)) * 2.0**-53).reshape(rows, columns)


def below(uniform: Float64[np.ndarray, "n"], bound: int | np.ndarray) -> Int64[np.ndarray, "n"]:
    """Map u in [0, 1) to an integer in [0, bound); the bias is below bound / 2^53."""
    # u·bound can round up to bound itself when bound is huge.
    return np.minimum((uniform * bound).astype(np.int64), np.asarray(bound, dtype=np.int64) - 1)


def epoch_order(
    seed: int, epoch: int, items: int, batches: int = 0
) -> tuple[Int64[np.ndarray, "items"], Int64[np.ndarray, "batches"]]:
    """The order of an epoch's items, and that of its batches: keyed by (seed, epoch)."""
    drawn = uniforms(seed, epoch, items + batches, 1)[:, 0]
    order, turns = (np.argsort(part, kind="stable") for part in np.split(drawn, [items]))
    return order, turns


def padded(
    rows: Sequence[Sequence[int] | np.ndarray], pad: int, length: int | None = None
) -> tuple[Int64[np.ndarray, "b t"], Bool[np.ndarray, "b t"]]:
    """Rows of ids, filled up on the right to `length` (default: the longest); True is padding."""
    lengths = np.array([len(row) for row in rows])
    width = int(lengths.max()) if length is None else length
    padding = np.arange(width) >= lengths[:, None]
    ids = np.full((len(rows), width), pad, dtype=np.int64)
    ids[~padding] = np.concatenate([np.asarray(row, dtype=np.int64) for row in rows])
    return ids, padding


def refuse_uneven_shares(batch_size: int, kind: str, share: int, shares: int) -> None:
    """Raise `InputError` where a batch of so many `kind` does not divide into so many shares.

    Equal shares alone give every row of the batch to one process.
    """
    if batch_size % shares or not 0 <= share < shares:
        raise InputError(
            f"a batch of {batch_size} {kind} does not divide into {shares} shares (share {share}); "
            f"take a multiple of {shares}"
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

    def batch(
        self, step: int, share: int = 0, shares: int = 1
    ) -> Int64[np.ndarray, "rows length_1"]:
        """Part `share` of `shares` of the batch of `step`: (batch_size / shares, length + 1).

        The shares' rows, in order, are the rows of the one batch. Raises `InputError` when the
        batch does not divide into so many shares.
        """
        refuse_uneven_shares(self.batch_size, "sequences", share, shares)
        count = self.batch_size // shares
        drawn = uniforms(self.seed, step, self.batch_size, 3)[share * count : (share + 1) * count]
        period = np.full(len(drawn), self.length + 1, dtype=np.int64)
        if self.tiling is not None:
            tiled = drawn[:, 0] < self.tiling.fraction
            drawn_period = below(drawn[:, 1], self.tiling.high - self.tiling.low + 1)
            period = np.where(tiled, self.tiling.low + drawn_period, period)
        first = below(drawn[:, 2], self.split.total - period + 1)
        rows = np.empty((count, self.length + 1), np.int64)
        for row, start, size in zip(rows, first.tolist(), period.tolist(), strict=True):
            segment = self.split.tokens[start : start + size]
            row[:] = segment if size > self.length else segment[self._columns % size]
        return rows


class MaskedRows(NamedTuple):
    """Rows with hidden tokens.

    `ids` (rows, length): what the model reads. `places` (rows, chosen): the positions whose tokens
    it is asked for, ascending. `targets` (rows, chosen): the tokens there before.
    """

    ids: Int64[np.ndarray, "rows length"]
    places: Int64[np.ndarray, "rows chosen"]
    targets: Int64[np.ndarray, "rows chosen"]


@dataclass(frozen=True)
class Masking:
    """BERT's masking: a share of each row's tokens is asked for; of these most are hidden.

    Of every row max(1, round(`share` · length)) tokens are chosen, none of them a separator while
    there are others. A chosen token becomes the mask with probability `masked`, any token but the
    separator with probability `random`, and stays as it is otherwise. The mask has the id
    `vocab_size`, one past the tokeniser's: a masked model's embedding has one row more than its
    vocabulary, and the tokens on disk are those of the causal models. Defaults: 0.15, 0.8, 0.1.
    Source: arXiv 1810.04805, section 3.1.
    """

    vocab_size: int
    share: float = 0.15
    masked: float = 0.8
    random: float = 0.1

    @property
    def mask_id(self) -> int:
        """The id of the mask."""
        return self.vocab_size

    def chosen(self, length: int) -> int:
        """How many tokens of a row of `length` are asked for."""
        return max(1, round(self.share * length))

    def rows(
        self, tokens: Int64[np.ndarray, "rows length"], seed: int, step: int = 0, first: int = 0
    ) -> MaskedRows:
        """Mask `tokens`, which are rows `first`, `first` + 1, … of step `step`.

        A row's mask depends on the seed, the step, its number and its own separators only.
        """
        count, length = tokens.shape
        chosen = self.chosen(length)
        drawn = uniforms(seed ^ _MASKING, step, first + count, length + 2 * chosen)[first:]
        # Separators come last, so that they are chosen only where nothing else is left.
        order = np.argsort(drawn[:, :length] + (tokens == SEPARATOR_ID), axis=1, kind="stable")
        places = np.sort(order[:, :chosen], axis=1)
        targets = np.take_along_axis(tokens, places, 1)
        fate, word = np.split(drawn[:, length:], 2, axis=1)
        other = 1 + below(word.ravel(), self.vocab_size - 1).reshape(word.shape)
        shown = np.where(fate < self.masked + self.random, other, targets)
        ids = tokens.copy()
        np.put_along_axis(ids, places, np.where(fate < self.masked, self.mask_id, shown), 1)
        return MaskedRows(ids, places, targets)


class MaskedBatches:
    """Masked training batches: the windows of `batches`, with new masks at every step."""

    def __init__(self, batches: TrainingBatches, masking: Masking) -> None:
        self.batches = batches
        self.masking = masking

    def batch(self, step: int, share: int = 0, shares: int = 1) -> MaskedRows:
        """Part `share` of `shares` of the batch of `step`; in order they are the whole batch."""
        tokens = self.batches.batch(step, share, shares)
        return self.masking.rows(tokens, self.batches.seed, step, first=share * len(tokens))
