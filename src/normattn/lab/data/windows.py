"""Token windows of the evaluation protocols, chosen by a seed, each inside one document.

Every window has `length` + 1 tokens, so `length` targets. Windows come from as many documents as
possible, because confidence intervals are bootstrapped over documents. No document has a second
window before every document has one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from jaxtyping import Bool, Int64

from normattn.errors import InputError
from normattn.lab.data.batches import MaskedRows, Masking
from normattn.lab.data.tokens import TokenSplit

MAX_TOKENS = 1 << 24
"""The longest window, as all windows of a set are in memory."""


@dataclass(frozen=True)
class EvaluationSet:
    """Windows of one protocol at one length.

    `windows` (W, length + 1); `documents`: the document of every window; `segments` (W,): the
    period of repeated windows, None for natural ones. Targets `start` … `length` − 1 are scored:
    all, except in the last-segment protocol.
    """

    protocol: str
    length: int
    train_length: int
    windows: Int64[np.ndarray, "w length_1"]
    documents: list[str]
    segments: Int64[np.ndarray, "w"] | None = None
    start: int = 0

    def __len__(self) -> int:
        return len(self.windows)

    @property
    def copyable(self) -> Bool[np.ndarray, "w length"] | None:
        """Whether target t occurs earlier in its context; None for natural windows.

        Target t is token t + 1 of the window. In a repeated window it is a copy of token t + 1 −
        segment, which is in the context if t + 1 ≥ segment.
        """
        if self.segments is None:
            return None
        return np.arange(1, self.length + 1) >= self.segments[:, None]

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the windows and their scored targets."""
        described = (self.protocol, self.length, self.train_length, self.start, self.documents)
        segments = () if self.segments is None else (self.segments,)
        return digest_of(described, self.windows, *segments)


def digest_of(described: object, *arrays: np.ndarray) -> str:
    """Return the SHA-256 of a value's repr and of arrays, as little-endian bytes."""
    digest = hashlib.sha256(repr(described).encode())
    for array in arrays:
        digest.update(array.astype(array.dtype.newbyteorder("<")).tobytes())
    return digest.hexdigest()


def natural_set(
    protocol: str,
    split: TokenSplit,
    train_length: int,
    multiple: int = 1,
    max_windows: int = 256,
    seed: int = 0,
) -> EvaluationSet:
    """Return disjoint windows of natural text of `multiple`·L tokens, every target scored.

    `protocol` names the set: "train_length" (one L), "non_repeated", or "by_position", which is
    evaluated in bins that grow with the position.
    """
    length = window_length(train_length, multiple)
    starts = choose_windows(split, length + 1, max_windows, seed).tolist()
    rows = [split.window(document, first, length + 1) for document, first in starts]
    documents = [split.names[document] for document, _ in starts]
    return EvaluationSet(protocol, length, train_length, np.array(rows, np.int64), documents)


def repeated_set(
    split: TokenSplit, train_length: int, multiple: int = 8, max_windows: int = 256, seed: int = 0
) -> EvaluationSet:
    """Return windows that repeat segments of ½L, L, 2L and 4L tokens to `multiple`·L tokens.

    Only segments shorter than the window are used, each length equally often. If long documents
    are few, all lengths have fewer windows.
    """
    length = window_length(train_length, multiple)
    periods = [max(1, train_length // 2), train_length, 2 * train_length, 4 * train_length]
    periods = sorted({period for period in periods if period < length})
    if not periods:
        raise InputError(f"no segment is shorter than a window of {length} tokens")
    share = max(1, max_windows // len(periods))
    candidates = [choose_windows(split, period, share, seed) for period in periods]
    count = min(map(len, candidates))
    rows, documents, segments = [], [], []
    for period, starts in zip(periods, candidates, strict=True):
        index = np.arange(length + 1) % period
        # Take the same number for every period, evenly from the candidates.
        for document, first in starts[np.arange(count) * len(starts) // count].tolist():
            rows.append(split.document(document)[first + index])
            documents.append(split.names[document])
            segments.append(period)
    windows = np.array(rows, dtype=np.int64)
    return EvaluationSet(
        "repeated", length, train_length, windows, documents, np.array(segments, dtype=np.int64)
    )


def last_segment_sets(
    split: TokenSplit,
    train_length: int,
    multiples: Sequence[int] = (1, 2, 4, 8),
    max_windows: int = 256,
    seed: int = 0,
) -> list[EvaluationSet]:
    """Return a set for every m: the same last L targets after m·L tokens of context."""
    longest = natural_set("last_segment", split, train_length, max(multiples), max_windows, seed)
    return [
        replace(
            longest,
            length=multiple * train_length,
            windows=longest.windows[:, longest.length - multiple * train_length :],
            start=(multiple - 1) * train_length,
        )
        for multiple in multiples
    ]


def window_length(train_length: int, multiple: int) -> int:
    """Return `train_length` × `multiple`; `InputError` if it is too long."""
    if train_length * multiple > MAX_TOKENS:
        raise InputError(
            f"{multiple:,} training lengths of {train_length:,} tokens are more than the "
            f"{MAX_TOKENS:,} that one window may hold"
        )
    return train_length * multiple


def choose_windows(split: TokenSplit, size: int, max_windows: int, seed: int) -> np.ndarray:
    """Return up to `max_windows` disjoint windows of `size` tokens as rows (document, first token).

    Every round takes a window from each document that has another one, the last from some of them.
    """
    documents = np.flatnonzero(split.lengths >= size)
    if len(documents) == 0:
        longest = int(split.lengths.max()) if len(split) else 0
        raise InputError(
            f"no document of the {split.name} split ({len(split):,} documents) is long enough for "
            f"a window of {size:,} tokens: the longest has {longest:,}; use a shorter length, "
            "longer documents or a larger share of them"
        )
    random = np.random.default_rng([seed, size])
    order = random.permutation(len(documents))
    available = split.lengths[documents] // size
    counts = np.zeros_like(available)
    while max_windows > 0 and (unused := np.flatnonzero(counts < available[order])).size:
        counts[unused[:max_windows]] += 1
        max_windows -= len(unused)
    starts = []
    for rank in np.flatnonzero(counts):
        document, windows = documents[order[rank]], available[order[rank]]
        # A random offset uses up the spare tokens, so that not every window begins a document.
        offset = random.integers(split.lengths[document] - windows * size + 1)
        for window in random.choice(windows, size=counts[rank], replace=False):
            starts.append((document, offset + window * size))
    return np.array(sorted(starts), dtype=np.int64)


@dataclass(frozen=True)
class MaskedSet:
    """Held-out windows, each inside one document, with masked tokens; equal for every model."""

    length: int
    rows: MaskedRows
    documents: list[str]

    def __len__(self) -> int:
        return len(self.documents)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the inputs, positions and targets."""
        return digest_of((self.length, self.documents), *self.rows)


def masked_set(
    split: TokenSplit,
    length: int,
    masking: Masking,
    vocab_size: int,
    max_windows: int = 256,
    seed: int = 0,
) -> MaskedSet:
    """Return disjoint windows of natural text of `length` tokens, masked once by `seed`."""
    texts = natural_set("masked", split, length - 1, max_windows=max_windows, seed=seed)
    return MaskedSet(length, masking.rows(texts.windows, vocab_size, seed), texts.documents)
