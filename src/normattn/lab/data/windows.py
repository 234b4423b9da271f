"""The evaluation protocols' token windows: chosen once, by a seed, each inside one document.

Every window has `length` + 1 tokens, so `length` targets. Windows come from as many documents as
possible, because confidence intervals are bootstrapped over documents: every document gives its
first window before any gives its second.
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

MOST_TOKENS = 1 << 24
"""In one window: rows of them are held at once."""


@dataclass(frozen=True)
class EvaluationSet:
    """Windows of one protocol at one length.

    `windows` (W, length + 1); `documents`: the document of every window; `segments` (W,): the
    period of tiled windows, None for natural ones. Targets `start` … `length` are scored: all of
    them, except where only the last segment counts.
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
    def scored(self) -> slice:
        """The targets that count."""
        return slice(self.start, self.length)

    @property
    def seen(self) -> Bool[np.ndarray, "w length"] | None:
        """Repeated windows: whether the answer to target t occurs earlier in its context.

        Target t is token t + 1 of the window, a copy of token t + 1 − segment, which is in the
        context once t + 1 ≥ segment.
        """
        if self.segments is None:
            return None
        return np.arange(1, self.length + 1) >= self.segments[:, None]

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of the windows and of what is scored in them."""
        described = (self.protocol, self.length, self.train_length, self.start, self.documents)
        segments = () if self.segments is None else (self.segments,)
        return digest_of(described, self.windows, *segments)


def digest_of(described: object, *arrays: np.ndarray) -> str:
    """sha256 of a value's text and of the numbers of some arrays, in their own types."""
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
    """Natural text of `multiple`·L tokens, windows that do not overlap, every token scored.

    `protocol` says what it is for: "train_length" (one L), "non_repeated", or "by_position", which
    is read off in bins that grow with the position.
    """
    length = window_length(train_length, multiple)
    places = choose_places(split, length + 1, max_windows, seed).tolist()
    rows = [split.window(document, first, length + 1) for document, first in places]
    documents = [split.names[document] for document, _ in places]
    return EvaluationSet(protocol, length, train_length, np.array(rows, np.int64), documents)


def repeated_set(
    split: TokenSplit, train_length: int, multiple: int = 8, max_windows: int = 256, seed: int = 0
) -> EvaluationSet:
    """Segments of ½L, L, 2L and 4L tokens in equal shares, tiled to `multiple`·L tokens.

    Only segments shorter than the window are used. The number of windows is a multiple of the
    number of segment lengths; where long documents are few, all shares shrink alike.
    """
    length = window_length(train_length, multiple)
    periods = [max(1, train_length // 2), train_length, 2 * train_length, 4 * train_length]
    periods = sorted({period for period in periods if period < length})
    if not periods:
        raise InputError(f"no segment is shorter than a window of {length} tokens")
    share = max(1, max_windows // len(periods))
    chosen = [choose_places(split, period, share, seed) for period in periods]
    count = min(len(places) for places in chosen)
    rows, documents, segments = [], [], []
    for period, places in zip(periods, chosen, strict=True):
        index = np.arange(length + 1) % period
        # As many of the places for every period, evenly over their order.
        for document, first in places[np.arange(count) * len(places) // count].tolist():
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
    """The same last L targets behind contexts of m·L tokens, one set for every m in `multiples`.

    All sets cut their windows from the same places, so row w scores the same tokens in each.
    """
    if not multiples or min(multiples) < 1:
        raise InputError(f"context multiples must be at least 1, got {tuple(multiples)}")
    whole = natural_set("last_segment", split, train_length, max(multiples), max_windows, seed)
    return [
        replace(
            whole,
            length=multiple * train_length,
            windows=whole.windows[:, whole.length - multiple * train_length :],
            start=(multiple - 1) * train_length,
        )
        for multiple in multiples
    ]


def window_length(train_length: int, multiple: int) -> int:
    """The tokens of so many training lengths; `InputError` for less than one or too many."""
    if train_length < 1 or multiple < 1:
        raise InputError(
            f"the training length and its multiple must be at least 1, got {train_length} and "
            f"{multiple}"
        )
    if train_length * multiple > MOST_TOKENS:
        raise InputError(
            f"{multiple:,} training lengths of {train_length:,} tokens are more than the "
            f"{MOST_TOKENS:,} that one window may hold"
        )
    return train_length * multiple


def choose_places(
    split: TokenSplit, size: int, max_windows: int, seed: int
) -> Int64[np.ndarray, "w 2"]:
    """Up to `max_windows` disjoint windows of `size` tokens as (document, first token), in order.

    Round r takes a window from every document that has more than r; a last round that would be
    too much takes a random part of the documents.
    """
    if max_windows < 1:
        raise InputError(f"an evaluation set needs at least 1 window, got {max_windows}")
    documents = split.documents_at_least(size)
    if len(documents) == 0:
        longest = int(split.lengths.max()) if len(split) else 0
        raise InputError(
            f"no document of the {split.name} split ({len(split):,} documents) is long enough for "
            f"a window of {size:,} tokens: the longest has {longest:,}; use a shorter length, "
            "longer documents or a larger share of them"
        )
    random = np.random.default_rng([seed, size])
    order = random.permutation(len(documents))
    counts = split.lengths[documents] // size
    taken = _even_counts(counts[order], max_windows)
    places = []
    for rank in np.flatnonzero(taken):
        document, have = documents[order[rank]], counts[order[rank]]
        # Spare tokens are left at a random side, so that not every window begins a document.
        shift = random.integers(split.lengths[document] - have * size + 1)
        for window in random.choice(have, size=taken[rank], replace=False):
            places.append((document, shift + window * size))
    return np.array(sorted(places), dtype=np.int64)


def _even_counts(have: Int64[np.ndarray, "n"], budget: int) -> Int64[np.ndarray, "n"]:
    """How many windows each document gives: as even as `have` allows, `budget` in all."""
    taken = np.zeros_like(have)
    while budget > 0:
        open_ = np.flatnonzero(taken < have)
        if len(open_) == 0:
            break
        # Whole rounds at once while everyone still has enough, then the odd rest in order.
        rounds = min(budget // len(open_), int((have - taken)[open_].min()))
        if rounds == 0:
            open_, rounds = open_[:budget], 1
        taken[open_] += rounds
        budget -= rounds * len(open_)
    return taken


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
        return digest_of((self.length, self.documents), *self.rows)


def masked_set(
    split: TokenSplit, length: int, masking: Masking, max_windows: int = 256, seed: int = 0
) -> MaskedSet:
    """Natural text of `length` tokens, windows that do not overlap, hidden once by `seed`.

    Raises `InputError` for a length below 2 and where no document is long enough.
    """
    texts = natural_set("masked", split, length - 1, max_windows=max_windows, seed=seed)
    return MaskedSet(length, masking.rows(texts.windows, seed), texts.documents)
