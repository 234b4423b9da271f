"""Training batches of documents: a pure function of seed and step, documents of like length."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from jaxtyping import Bool, Float32, Int64

from normattn.errors import InputError
from normattn.lab.data.batches import uniforms
from normattn.lab.data.relations.prepared import RelationSplit, padded

_POOL = 8
"""Batches whose documents are sorted by length among themselves."""


@dataclass(frozen=True)
class RelationBatch:
    """Documents as rows: ids (B, T), what is padding (B, T), and the labels (B, K) as 0 and 1."""

    ids: Int64[np.ndarray, "b t"]
    padding: Bool[np.ndarray, "b t"]
    labels: Float32[np.ndarray, "b k"]


class RelationBatches:
    """Batches of `batch_size` documents; each epoch sees every document once, in a new order.

    The order of an epoch: all documents shuffled, then sorted by length within every 8 batches, so
    that little is padded, then the batches shuffled. What does not fill the epoch's last batch is
    left out of that epoch. Raises `InputError` when the split holds less than one batch.
    """

    def __init__(
        self, split: RelationSplit, labels: int, pad: int, batch_size: int, seed: int
    ) -> None:
        if len(split) < batch_size:
            raise InputError(
                f"the {split.name} split has {len(split):,} documents, fewer than one batch of "
                f"{batch_size:,}; lower batch_size"
            )
        self.split = split
        self.labels = labels
        self.pad = pad
        self.batch_size = batch_size
        self.seed = seed
        self.per_epoch = len(split) // batch_size
        self._lengths = np.array([len(row) for row in split.tokens])
        self._epoch = lru_cache(maxsize=2)(self._order)

    @property
    def mean_tokens(self) -> float:
        """Word pieces of a document, on average."""
        return float(self._lengths.mean())

    def batch(self, step: int, share: int = 0, shares: int = 1) -> RelationBatch:
        """Part `share` of `shares` of the batch of `step` (from 1): every `shares`-th document.

        All parts of a batch are padded to the length of its longest document. Raises `InputError`
        when the batch does not divide into so many shares.
        """
        if self.batch_size % shares or not 0 <= share < shares:
            raise InputError(
                f"a batch of {self.batch_size} documents does not divide into {shares} shares "
                f"(share {share}); take a multiple of {shares}"
            )
        epoch, position = divmod(step - 1, self.per_epoch)
        chosen = self._epoch(epoch)[position]
        longest = int(self._lengths[chosen].max())
        mine = chosen[share::shares]
        ids, padding = padded([self.split.tokens[i] for i in mine], self.pad, longest)
        return RelationBatch(ids, padding, one_hot(self.split, mine, self.labels))

    def _order(self, epoch: int) -> Int64[np.ndarray, "batches b"]:
        """The documents of every batch of an epoch."""
        kept = self.per_epoch * self.batch_size
        drawn = uniforms(self.seed, epoch, 2, max(len(self.split), 2))
        order = np.argsort(drawn[0][: len(self.split)], kind="stable")[:kept]
        pool = _POOL * self.batch_size
        parts = [order[start : start + pool] for start in range(0, kept, pool)]
        by_length = [part[np.argsort(self._lengths[part], kind="stable")] for part in parts]
        batches = np.concatenate(by_length).reshape(self.per_epoch, self.batch_size)
        shuffled = np.argsort(drawn[1][: self.per_epoch], kind="stable")
        return np.asarray(batches[shuffled], dtype=np.int64)


def one_hot(
    split: RelationSplit, documents: Int64[np.ndarray, "b"], labels: int
) -> Float32[np.ndarray, "b k"]:
    """The labels of some documents of a split, 1 where one is present."""
    targets = np.zeros((len(documents), labels), dtype=np.float32)
    for row, document in enumerate(documents):
        targets[row, list(split.labels[document])] = 1.0
    return targets
