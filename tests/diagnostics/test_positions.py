"""What key norms say of positions, and what leaves its trained range: against numpy and scipy."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats

from diagnostics.test_diagnostics import NAMES, brute_weights, ids_of, look, model_of, texts_of
from normattn.lab.data.windows import EvaluationSet
from normattn.lab.diagnostics import BINS, measure_mechanism
from normattn.lab.diagnostics.key_norms import (
    FIRST,
    first_norms,
    position_correlation,
    signed_elsewhere,
    varied,
)
from normattn.lab.diagnostics.ranges import REGIONS, TAIL, pairs_by_region, trained_range
from normattn.models import CausalLM

Array = NDArray[np.float64]


def test_norms_that_grow_from_the_fifth_on_rank_as_their_positions_do() -> None:
    norms = torch.tensor([9.0, 8.0, 7.0, 6.0, 1.0, 2.0, 3.0, 4.0, 5.0])
    assert FIRST == 4
    assert float(position_correlation(norms)) == pytest.approx(1.0)
    assert float(position_correlation(10 - norms)) == pytest.approx(-1.0)
    assert first_norms(norms).tolist() == pytest.approx([3.0, 8 / 3, 7 / 3, 2.0])


def test_rounding_does_not_rank_equal_norms() -> None:
    norms = torch.tensor([1.0, 1.0, 1.0, 1.0, 2.0, 3.0, 2.0, 3.0], dtype=torch.float64)
    turned = norms + torch.linspace(0, 1e-7, 8, dtype=torch.float64)
    assert turned[4] < turned[6]
    assert float(position_correlation(turned)) == float(position_correlation(norms))
    assert float(position_correlation(norms)) == pytest.approx(1 / math.sqrt(5))


@pytest.mark.parametrize("length", [6, 7, 31])
def test_correlation_and_first_norms(length: int) -> None:
    norms = np.random.default_rng(length).integers(1, 9, size=(3, 2, length)).astype(float)
    correlation = position_correlation(torch.from_numpy(norms))
    first = first_norms(torch.from_numpy(norms))
    for at in np.ndindex(3, 2):
        rest = norms[at][4:]
        if len(set(rest)) == 1:
            assert math.isnan(correlation[at])
            continue
        expected = stats.spearmanr(rest, np.arange(len(rest))).statistic
        assert float(correlation[at]) == pytest.approx(expected, abs=1e-12)
        np.testing.assert_allclose(first[at], norms[at][:4] / np.median(rest), rtol=1e-12)


def test_norms_that_differ_by_rounding_do_not_vary() -> None:
    norms = torch.tensor([[1.0, 1 + 1e-6, 1.0, 1 - 1e-6], [1.0, 1.1, 1.0, 0.9]])
    assert varied(norms).tolist() == [False, True]


def test_a_sign_comes_from_other_documents_alone() -> None:
    total = np.array([[2.0, -3.0, 1.0], [4.0, -1.0, 2.0], [1.0, 2.0, -1.0], [-5.0, 6.0, 3.0]])
    count = np.array([[1.0, 2.0, 1.0], [2.0, 1.0, 1.0], [1.0, 1.0, 1.0], [3.0, 1.0, 1.0]])
    above, below = signed_elsewhere(total, count)
    # Signs of the first and third document together: +3, −1, and none.
    assert above.tolist() == [[0, 0, 0], [4, 1, 0], [0, 0, 0], [-5, -6, 0]]
    assert below.tolist() == [[0, 0, 0], [2, 1, 0], [0, 0, 0], [3, 1, 0]]
    for few in (1, 2, 3):
        assert not signed_elsewhere(total[:few], count[:few])[1].any()


def test_chance_has_no_size_and_is_rarely_taken_for_one() -> None:
    """2,000 models of three heads and 64 documents."""
    random = np.random.default_rng(0)
    noise = random.standard_t(4, size=(64, 2000, 3)) + random.normal(size=(64, 2000, 1))
    above, below = signed_elsewhere(noise, np.ones_like(noise))
    values = above[1::2].mean(-1)
    assert below.sum() == noise.size / 2
    z = values.mean(0) / (values.std(0, ddof=1) / math.sqrt(len(values)))
    assert abs(z.mean()) < 0.1
    limit = stats.t.ppf(0.975, 31)
    assert 0.015 < (z > limit).mean() < 0.04
    heads = random.choice([-1.0, 1.0], size=(2000, 3)) * 5
    above, below = signed_elsewhere(noise + heads, np.ones_like(noise))
    assert above.sum() / below.sum() == pytest.approx(5, abs=0.05)


@pytest.mark.parametrize("score", NAMES)
def test_pairs_and_attention_by_region(score: str) -> None:
    """One pair at a time: its distance, its cosine's bin, its weight."""
    length, trained = 70, 16
    random = np.random.default_rng(5)
    inside = torch.from_numpy(random.random((4, BINS)) < 0.8)
    for seen in look(model_of(score), ids_of(2, length)):
        pairs, attention = pairs_by_region(seen, inside, trained)
        problem = seen.problem
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


def key_norms_of(model: CausalLM, texts: EvaluationSet, raw: bool) -> Array:
    """‖k_j‖ by text, layer and key head at L."""
    ids = torch.from_numpy(texts.windows[:, : texts.train_length])
    keys = [seen.key if raw else seen.problem.k for seen in look(model, ids)]
    return np.stack([np.linalg.norm(k.numpy(), axis=-1) for k in keys], axis=1)


@pytest.mark.parametrize("score", ["Baseline", "KNA", "QKRMSNorm"])
@pytest.mark.parametrize("raw", [False, True])
def test_a_record_holds_them_by_document(score: str, raw: bool) -> None:
    model = model_of(score)
    texts = replace(texts_of(), documents=["b", "a", "b", "c", "d"])
    record = measure_mechanism(model, texts, seed=0, weights="w")
    norms, side = key_norms_of(model, texts, raw), "raw_" if raw else ""
    constant = score == "KNA" and not raw
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
        found = of(record, f"{side}position", layer, head)
        np.testing.assert_allclose(found["sum"], sums, atol=1e-9)
        assert found["of"].to_list() == ([0] * 4 if constant else [1, 2, 1, 1])
        signed = of(record, f"{side}position_size", layer, head)["sum"].to_list()
        # Documents a and c give the sign, b and d are measured.
        sign = np.sign(sums[0] + sums[2])
        np.testing.assert_allclose(signed, [0.0, sums[1] * sign, 0.0, sums[3] * sign], atol=1e-9)
        first = of(record, f"{side}first_norms", layer, head).filter(unit="b")
        rows = norms[documents == "b", layer, head]
        expected_first = (rows[:, :4] / np.median(rows[:, 4:], axis=1, keepdims=True)).sum(0)
        np.testing.assert_allclose(first["sum"], expected_first, rtol=1e-9)
        assert first["of"].to_list() == [2, 2, 2, 2]
    assert record.filter(statistic=f"{side}position")["head"].n_unique() == 2  # of keys


def test_regions_of_a_record_add_up() -> None:
    record = measure_mechanism(model_of("Baseline"), texts_of(), seed=0, weights="w")
    whole = record.filter(statistic="cosine", length=64)["sum"].sum()
    pairs, attention = (record.filter(statistic=name) for name in ("pairs", "attention"))
    assert pairs["sum"].sum() == whole
    assert pairs["length"].unique().to_list() == [64]
    far = pairs.filter(pl.col("bin") >= 2)["sum"].sum()
    assert far == 5 * 8 * sum(range(64 - 16 + 1))  # texts, heads of both layers
    one = attention.group_by("unit", "layer", "head").agg(pl.col("sum").sum(), pl.col("of").first())
    np.testing.assert_allclose(one["sum"], one["of"], rtol=1e-12)
    counted = dict(attention.group_by("unit").agg(pl.col("of").first()).rows())
    assert counted == {"a": 48, "b": 96, "c": 96}
    assert len(REGIONS) == attention["bin"].n_unique() == 4


def test_texts_too_short_for_a_rank_have_no_rows_of_norms_by_position() -> None:
    changes: dict[str, Any] = {"train_length": 5}
    windows = np.random.default_rng(3).integers(40, size=(2, 11))
    texts = EvaluationSet("non_repeated", 10, 5, windows, ["a", "b"])
    record = measure_mechanism(model_of("Baseline", **changes), texts, seed=0, weights="w")
    assert "position" not in set(record["statistic"])
    assert {"correlation", "pairs"} <= set(record["statistic"])
