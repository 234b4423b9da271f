"""What key norms say of positions, and what leaves its trained range: against numpy and scipy."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import polars as pl
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats

from diagnostics.test_diagnostics import LENGTHS, brute_weights, ids_of, look, model_of, texts_of
from normattn.lab.data.windows import EvaluationSet
from normattn.lab.diagnostics import BINS, measure_mechanism
from normattn.lab.diagnostics.keys import (
    TAIL,
    pairs_by_region,
    position_correlation,
    trained_range,
)
from normattn.lab.diagnostics.mechanism import READINGS
from normattn.models import CausalLM

Array = NDArray[np.float64]


def test_rounding_does_not_rank_equal_norms() -> None:
    norms = torch.tensor([1.0, 1.0, 1.0, 1.0, 2.0, 3.0, 2.0, 3.0], dtype=torch.float64)
    turned = norms + torch.linspace(0, 1e-7, 8, dtype=torch.float64)
    assert turned[4] < turned[6]
    assert float(position_correlation(turned)) == float(position_correlation(norms))
    assert float(position_correlation(norms)) == pytest.approx(1 / math.sqrt(5))


@pytest.mark.parametrize("length", [6, 7, 31])
def test_norms_rank_with_positions(length: int) -> None:
    norms = np.random.default_rng(length).integers(1, 9, size=(3, 2, length)).astype(float)
    correlation = position_correlation(torch.from_numpy(norms))
    for at in np.ndindex(3, 2):
        rest = norms[at][4:]
        if len(set(rest)) == 1:
            assert math.isnan(correlation[at])
            continue
        expected = stats.spearmanr(rest, np.arange(len(rest))).statistic
        assert float(correlation[at]) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("score", "length"), LENGTHS)
def test_pairs_and_attention_by_region(score: str, length: int) -> None:
    """One pair at a time: its distance, its cosine's bin, its weight."""
    trained = 8
    random = np.random.default_rng(5)
    inside = torch.from_numpy(random.random((4, BINS)) < 0.8)
    for seen in look(model_of(score), ids_of(2, length)):
        pairs, attention = pairs_by_region(seen, inside, trained)
        problem = seen.inputs
        for batch, head in ((0, 0), (1, 3)):
            weights = brute_weights(seen, batch, head)
            q, k = problem.q[batch, head], problem.k[batch, head // 2]
            counts, masses = np.zeros(4), np.zeros(4)
            for i in range(length):
                for j in range(i + 1):
                    cosine = float(torch.nn.functional.cosine_similarity(q[i], k[j], dim=0))
                    index = min(int((cosine + 1) * BINS / 2), BINS - 1)
                    region = 2 * (i - j >= trained) + (not inside[head, index])
                    window = problem.visibility.window
                    hidden = (window is not None and i - j >= window) or (
                        "Chunked" in score and i // 6 != j // 6
                    )
                    counts[region] += not hidden
                    masses[region] += weights[i][j] if i >= trained else 0.0
            # A cosine on an edge may fall to either side.
            assert np.abs(pairs[batch, head].numpy() - counts).sum() <= 2
            np.testing.assert_allclose(attention[batch, head], masses, atol=1e-9)


def test_the_trained_range() -> None:
    values = np.random.default_rng(2).normal(0.1, 0.2, size=20_000).clip(-1, 1)
    edges = np.linspace(-1, 1, BINS + 1)
    inside = trained_range(np.histogram(values, bins=edges)[0].astype(float))
    low, high = np.quantile(values, [TAIL, 1 - TAIL])
    expected = (edges[1:] > low) & (edges[:-1] < high)
    assert np.abs(np.flatnonzero(inside)[[0, -1]] - np.flatnonzero(expected)[[0, -1]]).max() <= 1


def of(record: pl.DataFrame, statistic: str, layer: int, head: int) -> pl.DataFrame:
    return record.filter(statistic=statistic, layer=layer, head=head).sort("unit", "bin")


def key_norms_of(model: CausalLM, texts: EvaluationSet) -> Array:
    """‖k_j‖ by text, layer and key head at L."""
    ids = torch.from_numpy(texts.windows[:, : texts.train_length])
    keys = [seen.inputs.k for seen in look(model, ids)]
    return np.stack([np.linalg.norm(k.numpy(), axis=-1) for k in keys], axis=1)


@pytest.mark.parametrize("score", ["Baseline", "KNA", "QKRMSNorm"])
def test_a_record_holds_them_by_document(score: str) -> None:
    model = model_of(score)
    texts = replace(texts_of(), documents=["b", "a", "b", "c", "d"])
    record = measure_mechanism(model, texts, seed=0, weights="w")
    norms, constant = key_norms_of(model, texts), score == "KNA"
    documents = np.array(texts.documents)
    for layer, head in np.ndindex(2, 2):
        sums = []
        for name in "abcd":
            rows = norms[documents == name, layer, head]
            if constant:
                sums.append(0.0)
                continue
            # To five digits: a token that comes twice has one norm, whatever rotating leaves.
            ranked = np.round(rows[:, 4:] / rows[:, 4:].mean(1, keepdims=True), 5)
            sums.append(sum(stats.spearmanr(row, np.arange(12)).statistic for row in ranked))
        found = of(record, "position", layer, head)
        np.testing.assert_allclose(found["sum"], sums, atol=1e-9)
        assert found["of"].to_list() == ([0] * 4 if constant else [1, 2, 1, 1])
        signed = of(record, "position_size", layer, head)["sum"].to_list()
        # Documents a and c give the sign, b and d are measured.
        sign = np.sign(sums[0] + sums[2])
        np.testing.assert_allclose(signed, [0.0, sums[1] * sign, 0.0, sums[3] * sign], atol=1e-9)
    assert record.filter(statistic="position")["head"].n_unique() == 2  # of keys


def last_scores(model: CausalLM, ids: np.ndarray, last: int) -> tuple[int, float]:
    """Right predictions and nats of the last tokens, from the logits."""
    with torch.no_grad():
        logits = model(torch.from_numpy(ids[None, :-1]))[0].numpy()
    chosen, targets = logits[-last:], ids[-last:]
    losses = np.log(np.exp(chosen).sum(-1)) - chosen[np.arange(last), targets]
    return int((chosen.argmax(-1) == targets).sum()), float(losses.sum())


@pytest.mark.parametrize("score", ["Baseline", "KNA-NoPE", "Baseline-ALiBi"])
def test_a_record_holds_the_readings_by_document(score: str) -> None:
    model, texts = model_of(score), texts_of()
    record = measure_mechanism(model, texts, seed=0, weights="w")
    assert model.spec == model.config.score.resolve(train_length=16)  # no method stays on
    rotary = score in ("Baseline", "KNA", "CosA")
    for reading in range(len(READINGS)):
        at = record.filter(length=64, bin=float(reading), unit="b")
        hits, loss = (at.filter(statistic=f"last_{name}") for name in ("accuracy", "loss"))
        if READINGS[reading] == "clamped" and not rotary:
            assert hits["of"].item() == loss["of"].item() == 0
            continue
        assert hits["of"].item() == loss["of"].item() == 32
        clamped = READINGS[reading] == "clamped"
        with model.using("ReRoPE", window=15) if clamped else nullcontext():
            expected = [
                last_scores(model, texts.windows[row, -17:] if reading == 0 else windows, 16)
                for row, windows in enumerate(texts.windows)
                if row in (0, 2)  # the texts of document b
            ]
        assert hits["sum"].item() == sum(right for right, _ in expected)
        assert loss["sum"].item() == pytest.approx(sum(nats for _, nats in expected), rel=1e-9)
