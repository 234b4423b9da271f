"""Tokens of a corpus, and the documents they belong to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import overload

import numpy as np
from jaxtyping import Int64, UInt16, UInt32

from normattn.lab.data.shards import TokenShards
from normattn.lab.data.splits import SplitName, Splits
from normattn.lab.data.tokeniser import Tokeniser

TokenArray = UInt16[np.ndarray, "tokens"] | UInt32[np.ndarray, "tokens"]
Tokens = TokenArray | TokenShards


class PackedNames(Sequence[str]):
    """Names of documents, decoded one at a time from one block of UTF-8 bytes.

    `ends[i]` is where name i ends in `raw`; millions of names need no Python objects.
    """

    def __init__(self, raw: np.ndarray | TokenShards, ends: np.ndarray | TokenShards) -> None:
        self._raw = raw
        self._ends = ends

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[str]: ...
    def __getitem__(self, index: int | slice) -> str | Sequence[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if index < 0:
            index += len(self)
        if not 0 <= index < len(self):
            raise IndexError(index)
        ends = self._ends[max(0, index - 1) : index + 1]
        start = int(ends[0]) if index else 0
        return bytes(self._raw[start : int(ends[-1])]).decode()


@dataclass(frozen=True)
class TokenSplit:
    """The tokens of one split: documents one behind the other, a separator (id 0) ending each.

    `tokens` (total,) is uint16 or uint32, in memory or in files; document i stands
    at `offsets[i]` … `offsets[i + 1]`, its separator included, and is called `names[i]`.
    `text_bytes` is the size of the text as UTF-8 (0 for generated tokens).
    """

    name: SplitName
    tokens: Tokens
    offsets: Int64[np.ndarray, "documents_1"] | TokenShards
    names: Sequence[str]
    text_bytes: int = 0

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

    def document(self, index: int) -> TokenArray:
        """The tokens of one document, without its separator."""
        if not 0 <= index < len(self):
            raise IndexError(f"the {self.name} split has {len(self)} documents, no {index}")
        start, end = self.offsets[index : index + 2].tolist()
        return self.tokens[start : end - 1]

    def window(self, document: int, first: int, length: int) -> TokenArray:
        """`length` tokens of a document, from its token `first` on."""
        start = int(self.offsets[document : document + 1][0]) + first
        return self.tokens[start : start + length]

    def token_counts(self, vocab_size: int) -> Int64[np.ndarray, "vocab"]:
        """How often each token occurs, separators included."""
        counts: np.ndarray = np.zeros(vocab_size, np.int64)
        parts = self.tokens.parts() if isinstance(self.tokens, TokenShards) else [self.tokens]
        for part in parts:
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
