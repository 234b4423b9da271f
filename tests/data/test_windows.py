"""Evaluation windows: inside one document, spread over documents, scored as the protocol says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from normattn.errors import InputError
from normattn.lab.data.tokens import TokenSplit
from normattn.lab.data.windows import (
    EvaluationSet,
    last_segment_sets,
    natural_set,
    repeated_set,
)

from .helpers import make_split

LENGTHS = st.lists(st.integers(0, 90), min_size=1, max_size=12).filter(lambda v: max(v) >= 33)


def places(split: TokenSplit, found: EvaluationSet) -> list[tuple[int, int]]:
    """Document and first token of every window; token values are their places, plus one."""
    first = found.windows[:, 0] - 1
    documents = np.searchsorted(split.offsets, first, side="right") - 1
    return list(zip(documents.tolist(), first.tolist(), strict=True))


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, most=st.integers(1, 30), seed=st.integers(0, 50))
def test_natural_windows_are_disjoint_whole_and_even(
    lengths: list[int], most: int, seed: int
) -> None:
    split = make_split(lengths)
    found = natural_set("train_length", split, 8, max_windows=most, seed=seed)
    assert found.windows.shape[1] == 9
    assert 0 not in found.windows
    np.testing.assert_array_equal(np.diff(found.windows), 1)
    where = places(split, found)
    assert [split.names[document] for document, _ in where] == found.documents
    by_document = Counter(document for document, _ in where)
    for document in by_document:
        starts = sorted(first for other, first in where if other == document)
        assert all(b - a >= 9 for a, b in pairwise(starts))
    have = {i: length // 9 for i, length in enumerate(lengths) if length >= 9}
    assert len(found) == min(most, sum(have.values()))
    # Nobody has two windows more than a document that could still give one.
    open_ = [by_document[i] for i, count in have.items() if by_document[i] < count]
    if open_:
        assert max(by_document.values()) <= min(open_) + 1


@settings(max_examples=30, deadline=None)
@given(lengths=LENGTHS, seed=st.integers(0, 50))
def test_the_last_segments_are_the_same_tokens_behind_every_context(
    lengths: list[int], seed: int
) -> None:
    split = make_split(lengths)
    sets = last_segment_sets(split, 4, max_windows=10, seed=seed)
    assert [found.length for found in sets] == [4, 8, 16, 32]
    for found in sets:
        targets = found.windows[:, 1:]
        np.testing.assert_array_equal(targets[:, found.scored], sets[0].windows[:, 1:])
        assert found.scored == slice(found.length - 4, found.length)
        assert found.windows.shape == (len(sets[0]), found.length + 1)
        assert found.documents == sets[0].documents
        np.testing.assert_array_equal(np.diff(found.windows), 1)
        assert 0 not in found.windows


@settings(max_examples=30, deadline=None)
@given(lengths=LENGTHS, most=st.integers(4, 40), seed=st.integers(0, 50))
def test_repeated_windows_tile_equal_shares_of_segments(
    lengths: list[int], most: int, seed: int
) -> None:
    split = make_split(lengths)
    found = repeated_set(split, 8, max_windows=most, seed=seed)
    assert found.segments is not None
    counts = Counter(found.segments.tolist())
    assert set(counts) == {4, 8, 16, 32}
    assert len(set(counts.values())) == 1
    assert len(found) <= most
    seen = found.copyable
    assert seen is not None
    for row, segment, name, known in zip(
        found.windows, found.segments, found.documents, seen, strict=True
    ):
        piece = row[:segment]
        np.testing.assert_array_equal(row, np.resize(piece, 65))
        np.testing.assert_array_equal(np.diff(piece), 1)
        document = split.document(list(split.names).index(name)).astype(np.int64)
        assert piece[0] in document
        assert piece[-1] in document
        # Every token of a segment is another one, so "stands earlier" can be looked up.
        looked_up = [row[t + 1] in row[: t + 1] for t in range(64)]
        assert looked_up == known.tolist()


MAKERS: list[Callable[[TokenSplit, int], EvaluationSet]] = [
    lambda split, seed: natural_set("train_length", split, 8, max_windows=6, seed=seed),
    lambda split, seed: natural_set("non_repeated", split, 4, 8, max_windows=6, seed=seed),
    lambda split, seed: repeated_set(split, 8, max_windows=8, seed=seed),
    lambda split, seed: last_segment_sets(split, 4, max_windows=6, seed=seed)[-1],
]


@pytest.mark.parametrize("make", MAKERS)
def test_the_seed_decides_the_set(make: Callable[[TokenSplit, int], EvaluationSet]) -> None:
    split = make_split([90] * 20)
    first, again, other = make(split, 0), make(split, 0), make(split, 1)
    assert first.fingerprint == again.fingerprint
    np.testing.assert_array_equal(first.windows, again.windows)
    assert first.fingerprint != other.fingerprint


def test_the_fingerprint_sees_what_is_scored() -> None:
    split = make_split([90] * 5)
    whole = natural_set("non_repeated", split, 4, 8)
    last = last_segment_sets(split, 4, multiples=[8])[0]
    np.testing.assert_array_equal(whole.windows, last.windows)
    assert whole.fingerprint != last.fingerprint


def test_too_short_documents_and_bad_numbers_are_refused() -> None:
    split = make_split([5, 30])
    with pytest.raises(InputError, match=r"window of 33 tokens: the longest has 30"):
        natural_set("non_repeated", split, 4, 8)
    with pytest.raises(InputError, match=r"test split \(0 documents\).* the longest has 0"):
        natural_set("train_length", make_split([]), 4)
    with pytest.raises(InputError, match="at least 1 window, got 0"):
        natural_set("train_length", split, 4, max_windows=0)
    with pytest.raises(InputError, match="at least 1, got 0 and 1"):
        natural_set("train_length", split, 0)
    with pytest.raises(InputError, match="context multiples"):
        last_segment_sets(split, 4, multiples=())
