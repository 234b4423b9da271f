"""Masked language modelling: which tokens are hidden, and what stands in their place.

The choice is a pure function of (seed, step) and the row, as the windows are: nothing is advanced
or stored, so a resumed run and another number of processes hide the same tokens.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Int64

from normattn.errors import InputError
from normattn.lab.data.counter_random import below, uniforms
from normattn.lab.data.evaluation_sets import train_length_set
from normattn.lab.data.packing import TrainingBatches
from normattn.lab.data.token_data import TokenSplit
from normattn.lab.data.tokeniser import SEPARATOR_ID

# Draws of the windows and of the masks come from different keys.
_STREAM = 0x6D61736B


class MaskedRows(NamedTuple):
    """Rows with hidden tokens.

    `ids` (rows, length): what the model reads. `places` (rows, chosen): the positions whose tokens
    it is asked for, ascending. `targets` (rows, chosen): what stood there.
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
    Raises `InputError` for shares outside 0 … 1. Source: arXiv 1810.04805, section 3.1.
    """

    vocab_size: int
    share: float = 0.15
    masked: float = 0.8
    random: float = 0.1

    def __post_init__(self) -> None:
        if self.vocab_size < 2:
            raise InputError(f"masking needs a vocabulary of at least 2, got {self.vocab_size}")
        if not 0 < self.share <= 1:
            raise InputError(f"the share of chosen tokens lies above 0 and up to 1: {self.share:g}")
        if self.masked < 0 or self.random < 0 or self.masked + self.random > 1:
            raise InputError(
                f"of the chosen tokens {self.masked:g} are masked and {self.random:g} replaced; "
                "both must be at least 0, and at most 1 together"
            )

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
        drawn = uniforms(seed ^ _STREAM, step, first + count, length + 2 * chosen)[first:]
        # Separators come last, so that they are chosen only where nothing else is left.
        order = np.argsort(drawn[:, :length] + (tokens == SEPARATOR_ID), axis=1, kind="stable")
        places = np.sort(order[:, :chosen], axis=1)
        targets = np.take_along_axis(tokens, places, 1)
        ids = tokens.copy()
        np.put_along_axis(ids, places, self._shown(targets, drawn[:, length:]), 1)
        return MaskedRows(ids, places, targets)

    def _shown(
        self,
        targets: Int64[np.ndarray, "rows chosen"],
        drawn: Float64[np.ndarray, "rows twice"],
    ) -> Int64[np.ndarray, "rows chosen"]:
        """What the model sees in place of the chosen tokens."""
        fate, word = np.split(drawn, 2, axis=1)
        other = 1 + below(word.ravel(), self.vocab_size - 1).reshape(word.shape)
        shown = np.where(fate < self.masked + self.random, other, targets)
        return np.where(fate < self.masked, self.mask_id, shown)


class MaskedBatches:
    """Masked training batches: the windows of `batches`, hidden anew at every step."""

    def __init__(self, batches: TrainingBatches, masking: Masking) -> None:
        self.batches = batches
        self.masking = masking

    def batch(self, step: int, rank: int = 0, world: int = 1) -> MaskedRows:
        """The rows of process `rank` of `world` at `step`; in order they are the whole batch."""
        tokens = self.batches.batch(step, rank, world)
        return self.masking.rows(tokens, self.batches.seed, step, first=rank * len(tokens))


@dataclass(frozen=True)
class MaskedSet:
    """Held-out texts with hidden tokens, the same for every model: rows are paired by them.

    `rows` are W windows, each inside one document, which `documents` names.
    """

    length: int
    rows: MaskedRows
    documents: list[str]

    def __len__(self) -> int:
        return len(self.documents)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of what the model reads and is asked for."""
        digest = hashlib.sha256(repr((self.length, self.documents)).encode())
        for array in self.rows:
            digest.update(np.ascontiguousarray(array, dtype="<i8").tobytes())
        return digest.hexdigest()


def masked_set(
    split: TokenSplit, length: int, masking: Masking, max_windows: int = 256, seed: int = 0
) -> MaskedSet:
    """Natural text of `length` tokens, windows that do not overlap, hidden once by `seed`.

    Raises `InputError` for a length below 2 and where no document is long enough.
    """
    texts = train_length_set(split, length - 1, max_windows=max_windows, seed=seed)
    return MaskedSet(length, masking.rows(texts.windows, seed), texts.documents)
