"""Retrieval through scorers whose outcome is known: copying, guessing, right elsewhere only."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from normattn.data import CopyTask, RetrievalSet, TokenData, retrieval_set
from normattn.data.retrieval import DEPTHS, TASKS
from normattn.errors import InputError, NormattnError
from normattn.evaluation import EvaluationStore, evaluate_retrieval, evaluate_run
from normattn.kernels.cross_entropy import TokenScores
from normattn.models import CausalLM, CausalLMConfig
from normattn.reports.records import read_record
from normattn.reports.retrieval_record import RetrievalRecord
from normattn.score import ScoreSpec

from .make import Counter, info

L, VOCABULARY = 64, 32
KNA = ScoreSpec.parse("KNA")


@cache
def data() -> TokenData:
    """Generated tokens whose periods are short, so that filler is easy to tell from facts."""
    return CopyTask(tokens=500, documents=8, document_tokens=700).token_data(VOCABULARY, 0)


def make(
    task: str = "passkey", multiple: int = 2, windows: int = 20, seed: int = 0
) -> RetrievalSet:
    return retrieval_set(data(), task, L, multiple, windows, seed)


def copying(ids: Tensor) -> TokenScores:
    """Predicts what followed the last four tokens when they stood in the text before."""
    correct = torch.zeros(ids.shape[0], ids.shape[1] - 1, dtype=torch.bool)
    for row, text in enumerate(ids.tolist()):
        for t in range(4, len(text) - 1):
            context = text[t - 3 : t + 1]
            before = [text[i + 4] for i in range(t - 3) if text[i : i + 4] == context]
            correct[row, t] = bool(before) and before[-1] == text[t + 1]
    return TokenScores(loss=1.0 - correct.float(), correct=correct)


def guessing(ids: Tensor) -> TokenScores:
    """Predicts tokens at random."""
    generator = torch.Generator().manual_seed(int(ids.sum()))
    guess = torch.randint(VOCABULARY, ids[:, 1:].shape, generator=generator)
    loss = torch.full(guess.shape, float(np.log(VOCABULARY)))
    return TokenScores(loss=loss, correct=guess == ids[:, 1:])


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("multiple", [1, 3])
def test_a_model_that_copies_gets_everything_right(task: str, multiple: int) -> None:
    record = evaluate_retrieval(copying, make(task, multiple), info())
    assert (record.task, record.length, record.depths) == (task, multiple * L, DEPTHS)
    answer = 3 + 3 + 4 if task == "variable_tracking" else 4
    assert record.tokens == ((answer,) * 5,) * 4
    assert record.correct == record.tokens
    assert record.counts("exact").mean() == 1
    assert record.counts("loss").sum() == 0


def test_a_model_that_guesses_is_right_by_chance() -> None:
    record = evaluate_retrieval(guessing, make(windows=400), info())
    tokens = record.counts("tokens").sum()
    share = record.counts("correct").sum() / tokens
    chance = 1 / VOCABULARY
    assert abs(share - chance) < 4 * np.sqrt(chance * (1 - chance) / tokens)
    assert record.counts("exact").mean() < 0.01
    np.testing.assert_allclose(record.counts("loss"), 4 * np.log(VOCABULARY), rtol=1e-6)


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
        assert evaluate_retrieval(scorer, found, info()).counts("exact").mean() == 1
    else:
        with pytest.raises(NormattnError, match=f"not finite in an answer of the {task}"):
            evaluate_retrieval(scorer, found, info())


def test_an_answer_with_one_wrong_token_is_wrong_as_a_whole() -> None:
    def scorer(ids: Tensor) -> TokenScores:
        correct = torch.ones(ids.shape[0], ids.shape[1] - 1, dtype=torch.bool)
        correct[0, -2] = False
        return TokenScores(loss=torch.ones(correct.shape), correct=correct)

    record = evaluate_retrieval(scorer, make(), info(), tokens_per_batch=5 * 2 * L)
    # A batch is one sample at its five depths: its first window, depth 0, has the wrong token.
    np.testing.assert_array_equal(record.counts("exact"), [[0, 1, 1, 1, 1]] * 4)
    np.testing.assert_array_equal(record.counts("correct"), [[3, 4, 4, 4, 4]] * 4)


@pytest.mark.parametrize(("budget", "rows"), [(1, 1), (2 * L, 1), (5 * L, 2), (10**6, 20)])
def test_batches_stay_within_the_budget_and_change_nothing(budget: int, rows: int) -> None:
    scorer, told = Counter(copying), list[tuple[int, int]]()
    record = evaluate_retrieval(
        scorer,
        make(),
        info(),
        tokens_per_batch=budget,
        progress=lambda done, total: told.append((done, total)),
    )
    assert max(shape[0] for shape in scorer.shapes) == rows
    assert sum(shape[0] for shape in scorer.shapes) == 20
    assert told[-1] == (20, 20)
    assert record == evaluate_retrieval(copying, make(), info())
    with pytest.raises(InputError, match="tokens_per_batch"):
        evaluate_retrieval(copying, make(), info(), tokens_per_batch=0)


def test_records_come_back_and_nothing_is_asked_twice(tmp_path: Path) -> None:
    store, scorer = EvaluationStore(tmp_path), Counter(copying)
    first = evaluate_retrieval(scorer, make(), info(), store=store)
    again = evaluate_retrieval(scorer, make(), info(), store=EvaluationStore(tmp_path))
    assert again == first == read_record(store.path(first.key))
    assert isinstance(again, RetrievalRecord)
    assert len(scorer.shapes) == 1
    for other in (make(seed=1), make("multi_key"), make(multiple=3), make(windows=15)):
        evaluate_retrieval(scorer, other, info(), store=store)
    evaluate_retrieval(scorer, make(), info(weights="others"), store=store)
    evaluate_retrieval(scorer, make(), info(spec="KNA-YaRN(factor=2)@8"), store=store)
    assert len(store.records()) == 7
    store.path(first.key).write_text("{")
    assert evaluate_retrieval(scorer, make(), info(), store=store) == first


def test_a_run_is_asked_under_every_method(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = CausalLMConfig(
        vocab_size=VOCABULARY, dim=16, layers=1, heads=2, train_length=L, score=KNA
    )
    model, store = CausalLM(config), EvaluationStore(tmp_path)
    sets = [make(task) for task in TASKS]
    records = evaluate_run(model, sets, run="r", seed=0, methods=("", "ReRoPE"), store=store)
    assert [(r.method, r.task) for r in records if isinstance(r, RetrievalRecord)] == [
        (method, task) for method in ("", "ReRoPE") for task in TASKS
    ]
    assert {record.protocol for record in records} == {"retrieval"}
    assert sorted(record.key for record in store.records()) == sorted(r.key for r in records)
