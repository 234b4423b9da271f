"""Protocols through scorers whose outcome is known: counts by hand, retrieval, what is stored."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import Float, Int
from polars.testing import assert_frame_equal
from torch import Tensor

from data.helpers import token_data
from normattn.errors import InputError, NormattnError
from normattn.kernels.cross_entropy import TokenScores
from normattn.lab.data.retrieval import DEPTHS, PASSAGE, TASKS, RetrievalSet, retrieval_set
from normattn.lab.data.tokeniser import train_tokeniser
from normattn.lab.data.tokens import TokenData
from normattn.lab.data.windows import EvaluationSet
from normattn.lab.evaluation import language_model
from normattn.lab.evaluation.language_model import evaluate_cell, evaluate_retrieval
from normattn.lab.evaluation.scorer import TokenScorer
from normattn.lab.stats import Identity, MeasurementStore, measurements

VOCABULARY = 16
SURE = 4.0  # logit of the predicted token; the others have 0


def successor_logits(ids: Int[Tensor, "b t"]) -> Float[Tensor, "b t v"]:
    """Logits of a model that always expects the number after the one it has just read."""
    following = torch.nn.functional.one_hot((ids + 1) % VOCABULARY, VOCABULARY)
    return SURE * following.float()


def successors(ids: Int[Tensor, "b t1"]) -> TokenScores:
    logits, targets = successor_logits(ids[:, :-1]).double(), ids[:, 1:]
    loss = torch.nn.functional.cross_entropy(logits.mT, targets, reduction="none")
    return TokenScores(loss, logits.argmax(-1) == targets)


def right_loss() -> float:
    return float(np.log(np.exp(SURE) + VOCABULARY - 1) - SURE)


def counting(*, broken_at: int = 0) -> np.ndarray:
    """A window 0, 1, 2 … of 8 tokens to score whose token `broken_at` (if any) is another."""
    window = np.arange(9) % VOCABULARY
    if broken_at:
        window[broken_at:] = (window[broken_at:] + 5) % VOCABULARY
    return window


def make_set(
    windows: Sequence[np.ndarray],
    protocol: str = "non_repeated",
    train_length: int = 8,
    **more: Any,
) -> EvaluationSet:
    rows = np.asarray(windows, dtype=np.int64)
    more = {"documents": [f"d{i}" for i in range(len(rows))], **more}
    return EvaluationSet(protocol, rows.shape[1] - 1, train_length, rows, **more)


def info(**changes: Any) -> Identity:
    fields: dict[str, Any] = {"study": "", "row": "KNA", "seed": 0, "score": "KNA@8"}
    return Identity(**(fields | {"weights": "w", "settings": "fp32"} | changes))


def table(measured: pl.DataFrame, statistic: str, column: str = "sum") -> np.ndarray:
    """One statistic's `column`, (units, bins), both ascending; every unit has every bin once."""
    rows = measured.filter(pl.col("statistic") == statistic).sort("unit", "bin")
    shape = (rows["unit"].n_unique(), rows["bin"].n_unique())
    assert rows.height == shape[0] * shape[1] > 0
    return rows[column].to_numpy().reshape(shape)


def edges_of(measured: pl.DataFrame) -> tuple[int, ...]:
    """The edges of the bins, which leave no gap and are those of every statistic."""
    for _, rows in measured.group_by("statistic"):
        assert set(rows.select("bin", "bin_end").rows()) == set(
            measured.select("bin", "bin_end").rows()
        )
    bins = sorted(set(measured.select("bin", "bin_end").rows()))
    assert all(a[1] == b[0] for a, b in itertools.pairwise(bins))
    return (*(int(start) for start, _ in bins), int(bins[-1][1]))


def one(measured: pl.DataFrame, column: str) -> Any:
    [value] = measured[column].unique().to_list()
    return value


class Counter:
    """A scorer that remembers the shapes it was asked for."""

    def __init__(self, scorer: TokenScorer | None = None) -> None:
        self.scorer = scorer or successors
        self.shapes: list[tuple[int, ...]] = []

    def __call__(self, ids: Tensor) -> TokenScores:
        self.shapes.append(tuple(ids.shape))
        return self.scorer(ids)


def test_counts_are_exact_and_windows_of_one_document_are_added_up() -> None:
    windows = [counting(), counting(broken_at=3), counting(broken_at=8)]
    chosen = make_set(windows, documents=["b", "a", "b"])
    found = evaluate_cell(successors, chosen, info(method="YaRN", seed=3))
    # Token 3 is scored at position 2, in the second bin of two positions; token 8 in the fourth.
    assert edges_of(found) == (0, 2, 4, 6, 8)
    assert set(found["statistic"]) == {"accuracy", "loss"}  # nothing is "seen" in natural text
    assert sorted(set(found["unit"])) == ["a", "b"]
    for statistic in ("accuracy", "loss"):
        assert table(found, statistic, "of").tolist() == [[2, 2, 2, 2], [4, 4, 4, 4]]
    assert table(found, "accuracy").tolist() == [[2, 1, 2, 2], [4, 4, 4, 3]]
    right, wrong = right_loss(), right_loss() + 4.0
    expected = [[2 * right] * 4, [4 * right] * 4]
    expected[0][1], expected[1][3] = right + wrong, 3 * right + wrong
    np.testing.assert_allclose(table(found, "loss"), expected, rtol=1e-6)
    told = {"row": "KNA", "score": "KNA@8", "method": "YaRN", "seed": 3, "weights": "w"}
    told |= {"protocol": "non_repeated", "length": 8, "train_length": 8, "split": "test"}
    told |= {"data": chosen.fingerprint, "settings": "fp32", "axis": "position"}
    assert {column: one(found, column) for column in told} == told


def test_only_the_last_segment_is_scored() -> None:
    windows = [counting(broken_at=2), counting(broken_at=6)]
    chosen = make_set(windows, protocol="last_segment", train_length=4, start=4)
    found = evaluate_cell(successors, chosen, info())
    assert edges_of(found) == (4, 5, 6, 7, 8)
    assert table(found, "accuracy").tolist() == [[1, 1, 1, 1], [1, 0, 1, 1]]
    assert table(found, "accuracy", "of").tolist() == [[1, 1, 1, 1]] * 2


def test_seen_tokens_are_those_whose_answer_stands_earlier() -> None:
    generator = np.random.default_rng(0)
    segments = [1, 2, 3, 5, 8]
    windows = [generator.permutation(VOCABULARY)[np.arange(21) % period] for period in segments]
    chosen = make_set(windows, protocol="repeated", segments=np.array(segments))
    found = evaluate_cell(successors, chosen, info())
    # By copying distance: each window has one, of all that it has seen.
    by_distance = found.filter(statistic="accuracy_by_distance", axis="distance")
    found = found.filter(axis="position")
    assert sorted(set(by_distance["bin"])) == [segment - 1 for segment in segments]
    measured = by_distance.filter(by_distance["of"] > 0)
    assert measured["bin"].to_list() == [segment - 1 for segment in segments]
    for column in ("sum", "of"):
        assert measured[column].to_list() == table(found, "accuracy_seen", column).sum(1).tolist()
    bins = list(itertools.pairwise(edges_of(found)))
    for w, window in enumerate(windows):
        seen, right = np.zeros(20, int), np.zeros(20, int)
        for t in range(20):  # a segment's tokens differ, so an equal token is the answer itself
            seen[t] = window[t + 1] in window[: t + 1]
            right[t] = window[t + 1] == (window[t] + 1) % VOCABULARY
        for statistic, column, counted in (
            ("accuracy_seen", "of", seen),
            ("accuracy_seen", "sum", seen & right),
            ("accuracy", "sum", right),
        ):
            expected = [counted[a:b].sum() for a, b in bins]
            assert table(found, statistic, column)[w].tolist() == expected


@pytest.mark.parametrize(("budget", "rows"), [(1, 1), (8, 1), (16, 2), (23, 2), (1000, 5)])
def test_batches_stay_within_the_budget_and_change_nothing(budget: int, rows: int) -> None:
    chosen = make_set([counting(broken_at=i) for i in range(1, 6)])
    scorer = Counter()
    found = evaluate_cell(scorer, chosen, info(), tokens_per_batch=budget)
    assert max(shape[0] for shape in scorer.shapes) == rows
    assert sum(shape[0] for shape in scorer.shapes) == 5
    assert_frame_equal(found, evaluate_cell(Counter(), chosen, info()), check_exact=True)


@given(
    train=st.integers(2, 80), multiple=st.sampled_from([1, 2, 3, 8, 16, 17, 64]), last=st.booleans()
)
def test_bins_cover_every_scored_position_once(train: int, multiple: int, last: bool) -> None:
    length = train * multiple
    start = length - train if last else 0
    edges = language_model.bin_edges(start, length, train)
    assert (edges[0], edges[-1]) == (start, length)
    assert all(a < b for a, b in itertools.pairwise(edges))
    assert len(edges) <= 16 * 7 + 1
    if train % 4 == 0 and multiple <= 16:
        assert {b - a for a, b in itertools.pairwise(edges)} == {train // 4}


def test_a_loss_that_is_not_finite_is_named() -> None:
    def scorer(ids: Tensor) -> TokenScores:
        loss = torch.zeros(ids.shape[0], ids.shape[1] - 1)
        loss[-1, 5] = float("nan")
        return TokenScores(loss=loss, correct=torch.zeros_like(loss, dtype=torch.bool))

    with pytest.raises(NormattnError, match="KNA gives a loss that is not finite at position 5"):
        evaluate_cell(scorer, make_set([counting()]), info())


@given(train=st.integers(1, 600), multiple=st.sampled_from([1, 2, 8, 16, 64]))
def test_rising_bins_cover_every_position_once_by_octaves(train: int, multiple: int) -> None:
    length = train * multiple
    edges = language_model.rising_edges(length, train)
    assert (edges[0], edges[-1]) == (0, length)
    assert all(a < b for a, b in itertools.pairwise(edges))
    assert {train * 2**k for k in range(7) if train * 2**k <= length} <= set(edges)
    wide = [(a, b) for a, b in itertools.pairwise(edges) if a >= 8 * train]
    assert all(b / a < 1.3 for a, b in wide)
    assert len(edges) < 4 * 6 + 2 * 11


# What is stored.
CHANGES: list[dict[str, Any]] = [
    *({"weights": "v"}, {"score": "KNA@9"}, {"settings": "bf16"}),
    *({"split": "validation"}, {"seed": 1}, {"factors": {"window": 4}}),
]


def test_an_evaluation_is_done_once_and_what_decides_it_is_in_its_key(tmp_path: Path) -> None:
    store, scorer = MeasurementStore(tmp_path), Counter()
    chosen = make_set([counting()])
    for change in ({}, {}, *CHANGES):
        evaluate_cell(scorer, chosen, info(**change), store=store)
    assert len(scorer.shapes) == len(store) == 1 + len(CHANGES)


def test_a_damaged_file_is_redone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store, scorer = MeasurementStore(tmp_path), Counter()
    chosen = make_set([counting()])
    first = evaluate_cell(scorer, chosen, info(), store=store)
    [path] = tmp_path.iterdir()
    whole = path.read_bytes()
    middle = len(whole) // 2
    flipped = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
    for damaged in (whole[:100], flipped, b""):
        path.write_bytes(damaged)
        with pytest.raises(InputError, match=path.name):
            store.frame()
        redone = evaluate_cell(scorer, chosen, info(), store=store)
        assert_frame_equal(redone, first, check_exact=True)
        said = capsys.readouterr().err
        assert re.search(rf"{path} is .*(damaged|not a measurements table).*repeated", said)
        assert path.read_bytes() == whole
    assert_frame_equal(store.frame(), measurements.sorted_rows(first), check_exact=True)
    assert len(scorer.shapes) == 4
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_an_unwritable_store_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = MeasurementStore(tmp_path / "file")
    with pytest.raises(InputError, match="cannot be written"):
        evaluate_cell(Counter(), make_set([counting()]), info(), store=store)


# Retrieval through scorers that copy, guess, or are right elsewhere only.
L = 64


@cache
def data() -> TokenData:
    """Eight documents of lines, a token a byte: a name has 3 tokens, a value 4."""
    texts = [f"{'some words ' * (2 + n)}\n" * 20 for n in range(8)]
    return token_data(texts, train_tokeniser(["line"], 257))


def make(task: str = "passkey", multiple: int = 2, count: int = 20, seed: int = 0) -> RetrievalSet:
    return retrieval_set(data(), task, L, multiple, count, seed)


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
    for statistic, total, of in (
        ("accuracy", answer, answer),
        ("exact", 1, 1),
        ("loss", 0, answer),
    ):
        assert table(found, statistic).tolist() == [[total] * 5] * 4
        assert table(found, statistic, "of").tolist() == [[of] * 5] * 4


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


def test_whatever_decides_a_retrieval_is_in_the_key(tmp_path: Path) -> None:
    store, scorer = MeasurementStore(tmp_path), Counter(copying)
    sets = (make(), make(seed=1), make("multi_key"), make(multiple=3), make(count=15), make())
    for chosen in sets:
        evaluate_retrieval(scorer, chosen, info(), store=store)
    assert len(scorer.shapes) == len(store) == 5
