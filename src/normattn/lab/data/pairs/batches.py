"""Batches of about so many tokens: sentences of like length together, each once an epoch.

A batch is a pure function of (seed, step): nothing is shuffled in place, stored or advanced, so a
resumed run, or another number of processes, sees the same sentences.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64

from normattn.errors import InputError
from normattn.lab.data.batches import uniforms
from normattn.lab.data.pairs.config import BOS_ID, EOS_ID, PAD_ID
from normattn.lab.data.pairs.pair_data import PairSplit, Side

PADDED_TO = 8
"""Lengths are padded to a multiple of this, and rows come in multiples of it."""


class PairBatch(NamedTuple):
    """Sentence pairs as rows, padded with 0 on the right.

    `source` (rows, S) ends each sentence with its end; `target` (rows, T + 1) stands between
    beginning and end: what the decoder reads is `target[:, :-1]`, what it predicts `target[:, 1:]`.
    A row whose target is the beginning alone fills the batch up and is scored nowhere. `targets`
    () counts the tokens to predict in the whole batch, of which this may be a share.
    """

    source: Int64[np.ndarray, "rows S"]
    target: Int64[np.ndarray, "rows T_1"]
    targets: Int64[np.ndarray, ""]


class PairBatches:
    """Batches of at most `batch_tokens` padded source and target tokens together.

    Sentences are sorted by their padded lengths (a multiple of 8 each) and cut into batches;
    within equal lengths their order is drawn anew for every epoch, and so is the order of the
    batches. The cuts are the same in every epoch, so there are `len(self)` batches in each, and
    every sentence is in exactly one of them. Rows come in multiples of 8: the last batch of the
    sorting may hold rows that are not scored.
    Raises `InputError` when the longest sentences do not fit into a batch, 8 at a time.
    """

    def __init__(self, split: PairSplit, batch_tokens: int, seed: int) -> None:
        self.split = split
        self.batch_tokens = batch_tokens
        self.seed = seed
        self._source = _padded(split.source.lengths + 1)
        self._target = _padded(split.target.lengths + 1)
        order = np.lexsort((self._target, self._source))
        self._cuts = _cut(self._source[order], self._target[order], batch_tokens)
        self._order = lru_cache(maxsize=2)(self._epoch_order)

    def __len__(self) -> int:
        """Batches of an epoch."""
        return len(self._cuts) - 1

    @property
    def padded_tokens(self) -> int:
        """Padded source and target tokens of an epoch: what its steps compute."""
        sizes = self.shapes()
        return int((sizes[:, 0] * (sizes[:, 1] + sizes[:, 2])).sum())

    def shapes(self) -> Int64[np.ndarray, "batches 3"]:
        """Rows, source length and target length of every batch of an epoch, in sorted order."""
        order = np.lexsort((self._target, self._source))
        shapes = []
        for start, stop in zip(self._cuts[:-1], self._cuts[1:], strict=True):
            rows = order[start:stop]
            full = -(-len(rows) // PADDED_TO) * PADDED_TO
            shapes.append((full, self._source[rows].max(), self._target[rows].max()))
        return np.array(shapes, dtype=np.int64)

    def batch(self, step: int, share: int = 0, shares: int = 1) -> PairBatch:
        """Part `share` of `shares` of the batch of `step` (from 1), in equal numbers of rows."""
        if PADDED_TO % shares or not 0 <= share < shares:
            raise InputError(
                f"a batch of sentence pairs is shared by 1, 2, 4 or 8 processes and micro-batches, "
                f"not by {shares} (share {share})"
            )
        epoch, position = divmod(step - 1, len(self))
        order, turns = self._order(epoch)
        cut = int(turns[position])
        rows = order[self._cuts[cut] : self._cuts[cut + 1]]
        size = int(self._source[rows].max()), int(self._target[rows].max())
        filler = -len(rows) % PADDED_TO
        # Every `shares`-th row: the rows are sorted by length, and shares should take equal time.
        mine = np.concatenate([rows, np.repeat(rows[:1], filler)])[share::shares]
        scored = (np.arange(len(rows) + filler) < len(rows))[share::shares]
        target = np.full((len(mine), size[1] + 1), PAD_ID, dtype=np.int64)
        target[:, 0] = BOS_ID
        _fill(target[:, 1:], self.split.target, np.where(scored, mine, -1))
        source = np.full((len(mine), size[0]), PAD_ID, dtype=np.int64)
        _fill(source, self.split.source, mine)
        return PairBatch(source, target, (self.split.target.lengths[rows] + 1).sum())

    def _epoch_order(
        self, epoch: int
    ) -> tuple[Int64[np.ndarray, "sentences"], Int64[np.ndarray, "batches"]]:
        """The sentences in this epoch's sorting, and the order in which its batches are taken."""
        drawn = uniforms(self.seed, epoch, len(self.split) + len(self), 1)[:, 0]
        order = np.lexsort((drawn[: len(self.split)], self._target, self._source))
        return order, np.argsort(drawn[len(self.split) :], kind="stable")


def _padded(lengths: Int64[np.ndarray, "n"]) -> Int64[np.ndarray, "n"]:
    return -(-lengths // PADDED_TO) * PADDED_TO


def _cut(
    source: Int64[np.ndarray, "n"], target: Int64[np.ndarray, "n"], batch_tokens: int
) -> list[int]:
    """Where batches begin and end in the sorted sentences: as many rows of 8 as fit."""
    cuts, rows, wide, high = [0], 0, 0, 0
    for start in range(0, len(source), PADDED_TO):
        here = source[start : start + PADDED_TO], target[start : start + PADDED_TO]
        new = max(wide, int(here[0].max())), max(high, int(here[1].max()))
        if PADDED_TO * sum((int(here[0].max()), int(here[1].max()))) > batch_tokens:
            need = PADDED_TO * (int(here[0].max()) + int(here[1].max()))
            raise InputError(
                f"{PADDED_TO} pairs of {here[0].max()} source and {here[1].max()} target tokens "
                f"make {need} tokens, more than batch_tokens ({batch_tokens}): raise it, or lower "
                "data.max_length"
            )
        if rows and (rows + PADDED_TO) * sum(new) > batch_tokens:
            cuts.append(start)
            rows, new = 0, (int(here[0].max()), int(here[1].max()))
        rows += PADDED_TO
        wide, high = new
    return [*cuts, len(source)]


def _fill(
    into: Int64[np.ndarray, "rows width"], side: Side, rows: Int64[np.ndarray, "rows"]
) -> None:
    """Write sentences and their ends into padded rows; row −1 writes nothing."""
    for index, row in enumerate(rows.tolist()):
        if row >= 0:
            sentence = side.sentence(row)
            into[index, : len(sentence)] = sentence
            into[index, len(sentence)] = EOS_ID
