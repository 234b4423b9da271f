"""Retrieval sets: facts where they are said to be, asked for once, and nothing else scored."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from normattn.errors import InputError
from normattn.lab.data.retrieval import DEPTHS, TASKS, RetrievalSet, retrieval_set
from normattn.lab.data.tokeniser import train_tokeniser
from normattn.lab.data.tokens import CopyTask, TokenData

from .helpers import token_data

L = 64


@cache
def code_data(lines: int = 400) -> TokenData:
    """Three documents of made-up source code for every split."""
    texts = [
        "".join(f"    {'ab'[i % 2]}{n} = call_{(i * i + n) % 17}(x, {i})\n" for i in range(lines))
        for n in range(3)
    ]
    return token_data(texts, train_tokeniser(texts, 300))


def make(task: str, multiple: int = 4, windows: int = 15, seed: int = 0) -> RetrievalSet:
    return retrieval_set(code_data(), task, L, multiple, windows, seed)


def occurrences(window: np.ndarray, piece: np.ndarray) -> list[int]:
    """Where `piece` begins in `window`, found by looking everywhere."""
    size = len(piece)
    return [i for i in range(len(window) - size + 1) if list(window[i : i + size]) == list(piece)]


def asked(found: RetrievalSet, sample: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """The questions at the end of a sample, each with its answer, read off what is scored."""
    window = found.windows[sample, 0]
    scored = [False, *found.scored[sample].tolist(), False]
    edges = [i for i in range(1, len(scored)) if scored[i] != scored[i - 1]]
    pairs = []
    for start, end in zip(edges[::2], edges[1::2], strict=True):
        begin = max(i for i in range(start) if window[i] == newline())
        pairs.append((window[begin:start], window[start:end]))
    return pairs


def newline() -> int:
    tokeniser = code_data().tokeniser
    assert tokeniser is not None
    return tokeniser.encode("\n")[0]


@pytest.mark.parametrize("task", TASKS)
def test_a_set_is_a_function_of_its_arguments(task: str) -> None:
    first, again = make(task), make(task)
    assert first.fingerprint == again.fingerprint
    np.testing.assert_array_equal(first.windows, again.windows)
    others = (make(task, seed=1), make(task, multiple=5), make(task, windows=10))
    assert len({first.fingerprint, *(other.fingerprint for other in others)}) == 4


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
    with pytest.raises(InputError, match="at least 1, got 64 and 0"):
        retrieval_set(code_data(), "passkey", L, 0)
    with pytest.raises(InputError, match="at least 1 window"):
        make("passkey", windows=0)


def test_key_value_texts_are_full_of_pairs_in_one_order() -> None:
    tokeniser = code_data().tokeniser
    assert tokeniser is not None
    found = make("key_value", multiple=16, windows=5)
    texts = [tokeniser.decode(window).split("\n") for window in found.windows[0]]
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
