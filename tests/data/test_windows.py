"""Evaluation windows and retrieval sets: inside documents, scored as the protocol says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from normattn.errors import InputError
from normattn.lab.data.retrieval import DEPTHS, TASKS, RetrievalSet, retrieval_set
from normattn.lab.data.tokeniser import Tokeniser, train_tokeniser
from normattn.lab.data.tokens import CopyTask, TokenData
from normattn.lab.data.windows import EvaluationSet, last_segment_sets, natural_set, repeated_set

from .helpers import make_split, token_data

LENGTHS = st.lists(st.integers(0, 90), min_size=1, max_size=12).filter(lambda v: max(v) >= 33)


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, most=st.integers(1, 30), seed=st.integers(0, 50))
def test_natural_windows_are_disjoint_and_even(lengths: list[int], most: int, seed: int) -> None:
    split = make_split(lengths)
    found = natural_set("train_length", split, 8, max_windows=most, seed=seed)
    assert found.windows.shape[1] == 9
    assert 0 not in found.windows
    np.testing.assert_array_equal(np.diff(found.windows), 1)
    # The document and the first token of every window; a token's value is its place, plus one.
    first = found.windows[:, 0] - 1
    inside = np.searchsorted(split.offsets, first, side="right") - 1
    where = list(zip(inside.tolist(), first.tolist(), strict=True))
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
def test_the_last_segments_are_the_same_behind_every_context(lengths: list[int], seed: int) -> None:
    split = make_split(lengths)
    sets = last_segment_sets(split, 4, max_windows=10, seed=seed)
    assert [found.length for found in sets] == [4, 8, 16, 32]
    for found in sets:
        targets = found.windows[:, 1:]
        np.testing.assert_array_equal(targets[:, found.start :], sets[0].windows[:, 1:])
        assert found.start == found.length - 4
        assert found.windows.shape == (len(sets[0]), found.length + 1)
        assert found.documents == sets[0].documents
        np.testing.assert_array_equal(np.diff(found.windows), 1)
        assert 0 not in found.windows


@settings(max_examples=30, deadline=None)
@given(lengths=LENGTHS, most=st.integers(4, 40), seed=st.integers(0, 50))
def test_repeated_windows_tile_equal_shares(lengths: list[int], most: int, seed: int) -> None:
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


def test_the_fingerprint_sees_what_is_scored_and_asked() -> None:
    split = make_split([90] * 5)
    whole = natural_set("non_repeated", split, 4, 8)
    last = last_segment_sets(split, 4, multiples=[8])[0]
    np.testing.assert_array_equal(whole.windows, last.windows)
    assert whole.fingerprint != last.fingerprint
    asked = (make("passkey"), make("passkey", multiple=5), make("passkey", windows=10))
    assert len({each.fingerprint for each in asked}) == 3


def test_too_short_documents_and_bad_numbers_are_refused() -> None:
    split = make_split([5, 30])
    with pytest.raises(InputError, match=r"window of 33 tokens: the longest has 30"):
        natural_set("non_repeated", split, 4, 8)
    with pytest.raises(InputError, match=r"test split \(0 documents\).* the longest has 0"):
        natural_set("train_length", make_split([]), 4)


# Retrieval sets.
L = 64


@cache
def code_data(lines: int = 400) -> TokenData:
    texts = [
        "".join(f"    {'ab'[i % 2]}{n} = call_{(i * i + n) % 17}(x, {i})\n" for i in range(lines))
        for n in range(3)
    ]
    return token_data(texts, train_tokeniser(texts, 300))


def make(task: str, multiple: int = 4, windows: int = 15, seed: int = 0) -> RetrievalSet:
    return retrieval_set(code_data(), task, L, multiple, windows, seed)


def occurrences(window: np.ndarray, piece: np.ndarray) -> list[int]:
    size = len(piece)
    return [i for i in range(len(window) - size + 1) if list(window[i : i + size]) == list(piece)]


def asked(found: RetrievalSet, sample: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """The questions at the end of a sample, each with its answer, read off what is scored."""
    window = found.windows[sample, 0]
    scored = [False, *found.scored[sample].tolist(), False]
    edges = [i for i in range(1, len(scored)) if scored[i] != scored[i - 1]]
    pairs, (newline,) = [], tokeniser().encode("\n")
    for start, end in zip(edges[::2], edges[1::2], strict=True):
        begin = max(i for i in range(start) if window[i] == newline)
        pairs.append((window[begin:start], window[start:end]))
    return pairs


def tokeniser() -> Tokeniser:
    found = code_data().tokeniser
    assert found is not None
    return found


SPLIT = make_split([90] * 20)
MAKERS: list[Callable[[int], EvaluationSet | RetrievalSet]] = [
    lambda seed: natural_set("train_length", SPLIT, 8, max_windows=6, seed=seed),
    lambda seed: natural_set("non_repeated", SPLIT, 4, 8, max_windows=6, seed=seed),
    lambda seed: repeated_set(SPLIT, 8, max_windows=8, seed=seed),
    lambda seed: last_segment_sets(SPLIT, 4, max_windows=6, seed=seed)[-1],
    *(partial(lambda task, seed: make(task, seed=seed), task) for task in TASKS),
]


@pytest.mark.parametrize("maker", MAKERS)
def test_the_seed_decides_the_set(maker: Callable[[int], EvaluationSet | RetrievalSet]) -> None:
    first, again, other = maker(0), maker(0), maker(1)
    assert first.fingerprint == again.fingerprint != other.fingerprint
    np.testing.assert_array_equal(first.windows, again.windows)


@pytest.mark.parametrize("task", TASKS)
def test_every_answer_stands_once_before_it_is_asked(task: str) -> None:
    found = make(task)
    assert found.windows.shape == (3, len(DEPTHS), 4 * L + 1)
    for sample in range(len(found)):
        pairs = asked(found, sample)
        assert len(pairs) == (3 if task == "variable_tracking" else 1)
        for depth in range(len(DEPTHS)):
            window = found.windows[sample, depth]
            for question, answer in pairs:
                statement = np.concatenate([question, answer])
                places = occurrences(window, question)
                assert places == occurrences(window, statement)
                assert len(places) == 2
        assert not found.scored[sample, : -sum(len(q) + len(a) for q, a in pairs)].any()
        assert found.scored[sample].sum() == sum(len(answer) for _, answer in pairs)


def test_the_passkey_stands_at_its_depth_of_one_document() -> None:
    data = code_data()
    found = make("passkey")
    for sample, document in enumerate(found.documents):
        ((question, answer),) = asked(found, sample)
        size = len(question) + len(answer)
        text = list(data.test.document(list(data.test.names).index(document)))
        fillers = []
        for depth, window in zip(DEPTHS, found.windows[sample], strict=True):
            place = occurrences(window, question)[0]
            filler = [*window[:place], *window[place + size : -size]]
            fillers.append(filler)
            assert abs(place - depth * len(filler)) <= len(filler) / 16 + 1
            np.testing.assert_array_equal(window[-size:], [*question, *answer])
        assert all(filler == fillers[0] for filler in fillers)
        assert occurrences(np.array(text), np.array(fillers[0]))
    assert (found.windows[:, -1, -1] == found.windows[:, 0, -1]).all()


def test_senseless_requests_are_refused() -> None:
    generated = CopyTask(documents=6, document_tokens=300).token_data(64, 0)
    with pytest.raises(InputError, match="generated tokens have none"):
        retrieval_set(generated, "passkey", L, 1)
    with pytest.raises(InputError, match="no retrieval task is called 'needle'"):
        retrieval_set(code_data(), "needle", L)
    with pytest.raises(InputError, match=r"16 tokens is too short for multi-key: .* alone take"):
        retrieval_set(code_data(), "multi_key", 16, 1)
    with pytest.raises(InputError, match=r"no document of the test split .* is long enough"):
        retrieval_set(code_data(), "passkey", L, 4096)


def test_key_value_texts_are_full_of_pairs_in_one_order() -> None:
    found = make("key_value", multiple=16, windows=5)
    texts = [tokeniser().decode(window).split("\n") for window in found.windows[0]]
    pairs = [[line for line in text[1:] if "=" in line] for text in texts]
    asked_line = pairs[0][-1]
    names, values = zip(*(line.split("=") for line in pairs[0][:-1]), strict=True)
    assert len(set(names)) == len(names) > 16 * L / 16
    assert len(set(values)) == len(values)
    for depth, lines in zip(DEPTHS, pairs, strict=True):
        assert lines[-1] == asked_line
        assert lines.index(asked_line) == round(depth * (len(lines) - 2))
        # Only the asked pair moves.
        assert [line for line in lines if line != asked_line] == pairs[0][1:-1]
    # No room is left for another pair.
    assert all(len(text[0]) < 40 for text in texts)
