"""Retrieval through scorers whose outcome is known: copying, guessing, right elsewhere only."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from data.helpers import token_data
from normattn.errors import NormattnError
from normattn.kernels.cross_entropy import TokenScores
from normattn.lab.data.retrieval import DEPTHS, PASSAGE, TASKS, RetrievalSet, retrieval_set
from normattn.lab.data.tokeniser import train_tokeniser
from normattn.lab.data.tokens import TokenData
from normattn.lab.evaluation.retrieval import evaluate_retrieval
from normattn.lab.stats import MeasurementStore

from .make import Counter, info, one, table

L = 64


@cache
def data() -> TokenData:
    """Eight documents of lines, a token a byte: a name has 3 tokens, a value 4."""
    texts = [f"{'some words ' * (2 + n)}\n" * 20 for n in range(8)]
    return token_data(texts, train_tokeniser(["line"], 257))


def make(
    task: str = "passkey", multiple: int = 2, windows: int = 20, seed: int = 0
) -> RetrievalSet:
    return retrieval_set(data(), task, L, multiple, windows, seed)


def copying(ids: Tensor) -> TokenScores:
    """Predicts what followed the beginning of the line when it stood in the text before."""
    tokeniser = data().tokeniser
    assert tokeniser is not None
    (newline,) = tokeniser.encode("\n")
    correct = torch.zeros(ids.shape[0], ids.shape[1] - 1, dtype=torch.bool)
    for row, text in enumerate(ids.tolist()):
        for t in range(4, len(text) - 1):
            if newline not in text[: t + 1]:
                continue
            size = text[t::-1].index(newline) + 1
            context = text[t + 1 - size : t + 1]
            places = range(t + 1 - size)
            before = [text[i + size] for i in places if text[i : i + size] == context]
            correct[row, t] = bool(before) and before[-1] == text[t + 1]
    return TokenScores(loss=1.0 - correct.float(), correct=correct)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("multiple", [1, 3])
def test_a_model_that_copies_gets_everything_right(task: str, multiple: int) -> None:
    chosen = make(task, multiple)
    found = evaluate_retrieval(copying, chosen, info())
    told = {"factor.task": task, "length": multiple * L, "protocol": "retrieval", "row": "KNA"}
    told |= {"data": chosen.fingerprint, "weights": "w", "score": "KNA@8", "axis": "depth"}
    assert {column: one(found, column) for column in told} == told
    assert tuple(sorted(set(found["bin"]))) == DEPTHS
    assert set(found["statistic"]) == {"exact", "accuracy", "loss"}
    answer = {"variable_tracking": 3 + 3 + 4, "copy": 4 * PASSAGE}.get(task, 4)
    assert table(found, "accuracy", "of").tolist() == [[answer] * 5] * 4
    assert table(found, "loss", "of").tolist() == [[answer] * 5] * 4
    assert table(found, "accuracy").tolist() == [[answer] * 5] * 4
    assert table(found, "exact").tolist() == table(found, "exact", "of").tolist() == [[1] * 5] * 4
    assert table(found, "loss").tolist() == [[0] * 5] * 4


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("task", TASKS)
def test_only_answers_are_scored(task: str, inside: bool) -> None:
    found = make(task)
    flat = found.windows.reshape(-1, found.length + 1).tolist()
    scored = np.repeat(found.scored, len(DEPTHS), axis=0)

    def scorer(ids: Tensor) -> TokenScores:
        rows = [flat.index(window) for window in ids.tolist()]
        correct = torch.from_numpy(scored[rows] == inside)
        return TokenScores(loss=torch.where(correct, 0.0, torch.inf), correct=correct)

    if inside:
        # An infinite loss elsewhere does not matter.
        exact = table(evaluate_retrieval(scorer, found, info()), "exact")
        assert exact.tolist() == [[1] * 5] * 4
    else:
        with pytest.raises(NormattnError, match=f"not finite in an answer of the {task}"):
            evaluate_retrieval(scorer, found, info())


def test_an_answer_with_one_wrong_token_is_wrong_as_a_whole() -> None:
    def scorer(ids: Tensor) -> TokenScores:
        correct = torch.ones(ids.shape[0], ids.shape[1] - 1, dtype=torch.bool)
        correct[0, -2] = False
        return TokenScores(loss=torch.ones(correct.shape), correct=correct)

    found = evaluate_retrieval(scorer, make(), info(), tokens_per_batch=5 * 2 * L)
    # A batch is one sample at its five depths: its first window, depth 0, has the wrong token.
    np.testing.assert_array_equal(table(found, "exact"), [[0, 1, 1, 1, 1]] * 4)
    np.testing.assert_array_equal(table(found, "accuracy"), [[3, 4, 4, 4, 4]] * 4)


def test_whatever_decides_the_outcome_is_in_the_key(tmp_path: Path) -> None:
    """The rest of the store is tested in test_protocols.py."""
    store, scorer = MeasurementStore(tmp_path), Counter(copying)
    sets = (make(), make(seed=1), make("multi_key"), make(multiple=3), make(windows=15), make())
    for chosen in sets:
        evaluate_retrieval(scorer, chosen, info(), store=store)
    assert len(scorer.shapes) == len(store) == 5
