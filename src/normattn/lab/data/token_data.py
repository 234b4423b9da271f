"""Tokens of a corpus, and the documents they belong to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from jaxtyping import Int64, UInt16, UInt32

from normattn.lab.data.splits import SplitName, Splits
from normattn.lab.data.store import Values
from normattn.lab.data.tokeniser import Tokeniser

Tokens = UInt16[np.ndarray, "tokens"] | UInt32[np.ndarray, "tokens"]
_COUNTED_AT_ONCE = 1 << 21


@dataclass(frozen=True)
class TokenSplit:
    """The tokens of one split: documents one behind the other, a separator (id 0) ending each.

    `tokens` (total,) is uint16 or uint32, in memory or in a file; document i stands
    at `offsets[i]` … `offsets[i + 1]`, its separator included, and is called `names[i]`.
    """

    name: SplitName
    tokens: Values
    offsets: Values
    names: Sequence[str]

    def __len__(self) -> int:
        return len(self.names)

    @property
    def total(self) -> int:
        """Tokens in all, separators included."""
        return len(self.tokens)

    @cached_property
    def lengths(self) -> Int64[np.ndarray, "documents"]:
        """Tokens of every document, without its separator."""
        return np.diff(np.asarray(self.offsets)) - 1

    def document(self, index: int) -> Tokens:
        """The tokens of one document, without its separator."""
        if not 0 <= index < len(self):
            raise IndexError(f"the {self.name} split has {len(self)} documents, no {index}")
        start, stop = self.offsets[index : index + 2].tolist()
        return np.asarray(self.tokens[start : stop - 1])

    def window(self, document: int, first: int, length: int) -> Tokens:
        """`length` tokens of a document, from its token `first` on."""
        start = int(self.offsets[document]) + first
        return np.asarray(self.tokens[start : start + length])

    def token_counts(self, vocab_size: int) -> Int64[np.ndarray, "vocab"]:
        """How often each token occurs, separators included."""
        counts: np.ndarray = np.zeros(vocab_size, np.int64)
        for start in range(0, self.total, _COUNTED_AT_ONCE):
            part = self.tokens[start : start + _COUNTED_AT_ONCE]
            counts += np.bincount(part, minlength=vocab_size)
        return counts

    def documents_at_least(self, length: int) -> Int64[np.ndarray, "chosen"]:
        """The documents of at least `length` tokens (separator not counted), in order."""
        return np.flatnonzero(self.lengths >= length).astype(np.int64)


@dataclass(frozen=True)
class TokenData(Splits[TokenSplit]):
    """A corpus as tokens: three splits that share no document, and how they were made.

    `vocab_size` is the configured size, the one that a model needs; the tokeniser (None for
    generated tokens) may have fewer entries when the text was small. `fingerprint` is a hash of
    the tokens themselves: equal on every machine that has the same text. `sources` are what the
    text was taken from, each with its version, where the corpus says.
    """

    tokeniser: Tokeniser | None
    vocab_size: int
    fingerprint: str
    sources: Mapping[str, str] = field(default_factory=dict)
