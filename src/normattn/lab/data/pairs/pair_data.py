"""Sentence pairs as tokens, in memory-mapped arrays, with the text of those that are held out."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Int64, UInt16

from normattn.lab.data.pairs.config import BOS_ID, EOS_ID
from normattn.lab.data.splits import SplitName, Splits
from normattn.lab.data.tokeniser import Tokeniser


@dataclass(frozen=True)
class Side:
    """One language of a split: sentence i is `tokens[offsets[i] : offsets[i + 1]]`."""

    tokens: UInt16[np.ndarray, "tokens"]
    offsets: Int64[np.ndarray, "sentences_1"]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def sentence(self, index: int) -> UInt16[np.ndarray, "length"]:
        """The tokens of one sentence, without special ones: a view, not a copy."""
        return self.tokens[int(self.offsets[index]) : int(self.offsets[index + 1])]

    @cached_property
    def lengths(self) -> Int64[np.ndarray, "sentences"]:
        """Tokens of every sentence, without special ones."""
        return np.diff(self.offsets)


@dataclass(frozen=True)
class PairSplit:
    """The pairs of one split; `texts` are kept of held-out pairs only (empty for training)."""

    name: SplitName
    source: Side
    target: Side
    texts: Sequence[tuple[str, str]] = ()

    def __len__(self) -> int:
        return len(self.source)

    def source_ids(self, index: int) -> list[int]:
        """What the encoder reads of a pair: its tokens and the end of the sentence."""
        return [*self.source.sentence(index).tolist(), EOS_ID]

    def target_ids(self, index: int) -> list[int]:
        """A pair's translation between beginning and end."""
        return [BOS_ID, *self.target.sentence(index).tolist(), EOS_ID]

    def first(self, count: int | None) -> PairSplit:
        """The first `count` pairs (None: all of them)."""
        if count is None or count >= len(self):
            return self
        source, target = (
            Side(side.tokens[: int(side.offsets[count])], side.offsets[: count + 1])
            for side in (self.source, self.target)
        )
        return PairSplit(self.name, source, target, self.texts[:count])

    def fingerprint(self, data: str) -> str:
        """A hash of which pairs these are, of the data with the fingerprint `data`."""
        return hashlib.sha256(f"{data}/{self.name}/{len(self)}".encode()).hexdigest()

    @property
    def source_total(self) -> int:
        """Source tokens in all, the ends of the sentences included."""
        return len(self.source.tokens) + len(self)

    @property
    def target_total(self) -> int:
        """Tokens to predict in all, the ends of the sentences included."""
        return len(self.target.tokens) + len(self)


@dataclass(frozen=True)
class PairData(Splits[PairSplit]):
    """A corpus of sentence pairs in three splits, its tokenisers, and what was left out.

    With a shared vocabulary both tokenisers are one. `left_out` counts pairs with an empty side
    and training pairs that are too long. `fingerprint` is a hash of the tokens and texts.
    """

    source_tokeniser: Tokeniser
    target_tokeniser: Tokeniser
    left_out: Mapping[str, int]
    fingerprint: str

    def facts(self) -> str:
        """The sizes in one sentence."""
        sizes = ", ".join(f"{len(split):,} {split.name}" for split in self)
        skipped = ", ".join(f"{count:,} {why}" for why, count in self.left_out.items() if count)
        return f"{sizes} pairs" + (f" (left out: {skipped})" if skipped else "")
