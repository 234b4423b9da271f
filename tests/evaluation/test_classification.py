"""F1 of a classifier: by hand, by scikit-learn, by summed counts; the threshold; the probe."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from normattn.lab.data.relations import RelationData, RelationSplit
from normattn.lab.data.sources import SPLITS
from normattn.lab.data.tokeniser import WordPieces
from normattn.lab.evaluation.classification import (
    Predictions,
    document_sums,
    evaluate_classifier,
    predict,
    tune_threshold,
)
from normattn.lab.stats import Identity, estimate, select_sums, with_identity
from normattn.lab.stats.metrics import MACRO_F1, MICRO_F1, Metric
from normattn.models.classifier import Classifier
from normattn.models.config import ClassifierConfig

PIECES = WordPieces({"[PAD]": 0, "[UNK]": 1, **{f"w{n}": n for n in range(2, 10)}}, True)


def made(probabilities: list[list[float]], true: list[list[int]]) -> Predictions:
    loss = np.zeros(len(true), dtype=np.float32)
    return Predictions(np.array(probabilities, dtype=np.float32), np.array(true) > 0, loss)


def data(documents: int = 12, labels: int = 3) -> RelationData:
    """Documents of token 1 + label, of many lengths, in every split alike."""
    train, validation, test = (
        RelationSplit(
            name,
            [[1 + i % labels] * (1 + i % 5) for i in range(documents)],
            [[i % labels] for i in range(documents)],
            [f"{name}:{i}" for i in range(documents)],
            0,
        )
        for name in SPLITS
    )
    names = tuple("abcdefgh"[:labels])
    return RelationData(train, validation, test, names, 0, 10, PIECES, "0" * 64)


def who(row: str = "RMSNorm", seed: int = 1) -> Identity:
    return Identity("rmsnorm", row, row, seed, "classification", 0, 0)


def value(statistic: Metric, found: Predictions, threshold: float) -> float:
    names = [f"d{n}" for n in range(len(found.true))]
    counts = with_identity(who(), document_sums(found, threshold, names))
    sums = select_sums(counts, statistic.name)
    assert sums is not None
    return estimate(sums, statistic).value


def known(measured: pl.DataFrame, name: str) -> float:
    row = measured.filter(pl.col("statistic") == name, pl.col("protocol") == "training")
    assert row["of"].to_list() == [1.0]
    return float(row["sum"].item())


def classifier(labels: int = 3) -> Classifier:
    torch.manual_seed(0)
    config = ClassifierConfig(
        dim=8, layers=1, heads=1, train_length=8, vocab_size=10, labels=labels, dropout=0.5
    )
    return Classifier(config)


def test_f1_of_counts_by_hand() -> None:
    above, below = np.array([[6.0, 0, 0]]), np.array([[9.0, 2, 0]])
    assert MICRO_F1.value(above, below, above, below) == pytest.approx(100 * 6 / 11)
    # The third label is nowhere: it does not count.
    assert MACRO_F1.value(above, below, above, below) == pytest.approx(100 * (6 / 9 + 0) / 2)
    nothing = np.zeros((1, 3))
    assert MACRO_F1.value(nothing, nothing, nothing, nothing) == 0
    # Of this resample the second label was drawn, and the third, which was not, keeps its F1.
    whole_above, whole_below = np.array([[6.0, 0, 2]]), np.array([[8.0, 2, 2]])
    above, below = np.array([[8.0, 0, 0]]), np.array([[8.0, 1, 0]])
    assert MACRO_F1.value(above, below, whole_above, whole_below) == pytest.approx(
        100 * (1 + 0 + 1) / 3
    )


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 9), st.integers(2, 6))
def test_summed_counts_give_what_scikit_learn_gives(seed: int, rows: int, labels: int) -> None:
    f1_score = pytest.importorskip("sklearn.metrics").f1_score
    generator = np.random.default_rng(seed)
    found = Predictions(
        generator.random((rows, labels), dtype=np.float32),
        generator.random((rows, labels)) < 0.4,
        np.zeros(rows, dtype=np.float32),
    )
    predicted = found.probabilities >= 0.5
    there = (predicted | found.true).any(0)
    if there.any():
        micro, by_label = (
            f1_score(found.true, predicted, average=kind, zero_division=0)
            for kind in ("micro", None)
        )
        assert value(MICRO_F1, found, 0.5) == pytest.approx(100 * micro)
        assert value(MACRO_F1, found, 0.5) == pytest.approx(100 * by_label[there].mean())


def test_the_threshold_is_the_best_and_of_equal_ones_the_nearest_to_a_half() -> None:
    found = made([[0.305, 0.2], [0.31, 0.1]], [[1, 0], [1, 0]])
    threshold, reached = tune_threshold(found)
    assert (threshold, reached) == (0.3, 1.0)
    easy = made([[0.9], [0.1]], [[1], [0]])
    assert tune_threshold(easy) == (0.5, 1.0)


def test_every_document_is_measured() -> None:
    measured = evaluate_classifier(classifier(), data(), who("LayerNorm", 3))
    counts, losses = select_sums(measured, "f1"), select_sums(measured, "loss")
    assert counts is not None
    assert losses is not None
    assert counts.units == losses.units == tuple(sorted(f"test:{i}" for i in range(12)))
    assert (counts.seeds, counts.data, len(counts.bins)) == ((3,), "0" * 64, 3)
    found = predict(classifier(), data().split("test"), 0)
    predicted = found.probabilities >= known(measured, "threshold")
    order = [int(name.removeprefix("test:")) for name in counts.units]
    np.testing.assert_array_equal(counts.numerator[0], 2 * (predicted & found.true)[order])
    np.testing.assert_array_equal(
        counts.denominator[0], (predicted.astype(int) + found.true)[order]
    )
    np.testing.assert_array_equal(losses.numerator[0, :, 0], found.loss[order])
    assert losses.denominator.sum() == 12
    assert known(measured, "parameters") == sum(p.numel() for p in classifier().parameters())
    reached = tune_threshold(predict(classifier(), data().split("validation"), 0))[1]
    assert known(measured, "development_micro_f1") == reached
