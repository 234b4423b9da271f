"""Key norms, cosines and attention against double loops in float64, numpy and scipy."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from normattn.errors import InputError
from normattn.kernels.cosines import BINS
from normattn.lab.data.windows import EvaluationSet
from normattn.lab.diagnostics.keys import (
    TAIL,
    LayerInputs,
    count_cosines,
    mean_direction,
    observe_scores,
    pairs_by_region,
    position_correlation,
    products_by_distance,
    rank_correlation,
    received_attention,
    trained_range,
)
from normattn.lab.diagnostics.mechanism import READINGS, distance_octaves, measure_mechanism
from normattn.lab.report.view import View
from normattn.lab.stats import measurements
from normattn.lab.studies.mechanism import columns, product_between, rows
from normattn.models import CausalLM, CausalLMConfig

Array = NDArray[np.float64]

SCORES = ["Baseline", "CosA", "QKLayerNorm(gain=false)", "KNA-NoPE", "Baseline-ALiBi"]
SCORES += ["Baseline-SoftCap(cap=2)", "Baseline-SlidingWindow(window=5)", "KNA-Chunked(size=6)"]
# Longer than the blocks of rows that are held at once.
LENGTHS = [*((name, 20) for name in SCORES), ("KNA-logn", 70), ("Baseline-Sink", 70)]


def model_of(score: str, **changes: Any) -> CausalLM:
    torch.manual_seed(1)
    fields: dict[str, Any] = {"vocab_size": 40, "dim": 16, "layers": 2, "heads": 4, "kv_heads": 2}
    fields |= {"train_length": 16, "score": score, **changes}
    model = CausalLM(CausalLMConfig(**fields)).double()
    with torch.no_grad():  # Gains, slopes and sinks that have learned something.
        for name, parameter in model.named_parameters():
            if ".score." in name:
                parameter.mul_(1 + 0.3 * torch.rand_like(parameter)).add_(0.1)
    return model


def look(model: CausalLM, ids: Tensor) -> list[LayerInputs]:
    found: list[LayerInputs] = []
    with observe_scores(model, found.append), torch.no_grad():
        model(ids)
    return found


def ids_of(rows: int, length: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(0).integers(40, size=(rows, length)))


def matrices(seen: LayerInputs, batch: int, head: int) -> tuple[Any, Any, Any]:
    """q · k, which pairs are visible, and α: by their definitions."""
    p = seen.inputs
    products = (p.q[batch, head] @ p.k[batch, head // 2].T).numpy()
    query, key = np.indices(products.shape)
    visible = query >= key
    if p.mask.window is not None:
        visible &= query - key < p.mask.window
    if p.mask.query_documents is not None:  # chunks
        visible &= query // 6 == key // 6
    scores = products if p.cap is None else p.cap * np.tanh(products / p.cap)
    if p.bias is not None:
        scores = scores + p.bias[head].numpy()[abs(query - key)]
    weights = np.where(visible, np.exp(scores), 0.0)
    sink = 0.0 if p.sink is None else math.exp(p.sink[head].item())
    return products, visible, weights / (weights.sum(-1, keepdims=True) + sink)


@pytest.mark.parametrize(("score", "length"), LENGTHS)
def test_a_layer_pair_by_pair(score: str, length: int) -> None:
    """Attention received, cosines, and both by region: a pair's distance and its cosine's bin."""
    trained, edges = 8, np.linspace(-1, 1, BINS + 1)
    inside = torch.from_numpy(np.random.default_rng(5).random((4, BINS)) < 0.8)
    for seen in look(model_of(score), ids_of(2, length)):
        pairs, attention = pairs_by_region(seen, inside, trained)
        products, numbers_of = products_by_distance(seen, torch.tensor([0, 1, 2, 4, 8, length]))
        counted = count_cosines(seen)
        received = {n: received_attention(seen, n) for n in (1, length // 2, length)}
        for batch, head in ((0, 0), (1, 3)):
            dots, visible, weights = matrices(seen, batch, head)
            query, key = np.indices((length, length))
            for horizon, found in received.items():
                assert found.shape == (2, 4, length - horizon + 1)
                seen_by = [weights[j : j + horizon, j] for j in range(length - horizon + 1)]
                expected = [a @ np.arange(j + 1, j + 1 + horizon) for j, a in enumerate(seen_by)]
                np.testing.assert_allclose(found[batch, head] * horizon, expected, rtol=1e-9)
            q, k = seen.inputs.q[batch, head], seen.inputs.k[batch, head // 2]
            cosines = torch.cosine_similarity(q[:, None], k[None], dim=-1).numpy()
            for n, (low, high) in enumerate(pairwise([0, 1, 2, 4, 8, length])):
                held = visible & (query - key >= low) & (query - key < high)
                assert numbers_of[batch, head, n] == held.sum()
                total = float(products[batch, head, n])
                assert total == pytest.approx(dots[held].sum(), abs=1e-9)
            values = cosines[visible]
            counts = np.histogram(values, bins=edges)[0]
            # A cosine on an edge may fall to either side.
            assert np.abs(counted.counts[batch, head].numpy() - counts).sum() <= 2
            assert counted.counts[batch, head].sum() == len(values)
            assert float(counted.least[batch, head]) == pytest.approx(values.min(), abs=1e-12)
            assert float(counted.most[batch, head]) == pytest.approx(values.max(), abs=1e-12)
            bins = np.clip(((cosines + 1) * BINS / 2).astype(int), 0, BINS - 1)
            region = 2 * (query - key >= trained) + ~inside[head].numpy()[bins]
            numbers = [(visible & (region == r)).sum() for r in range(4)]
            late = weights * (query >= trained)
            masses = [late[region == r].sum() for r in range(4)]
            assert np.abs(pairs[batch, head].numpy() - numbers).sum() <= 2
            np.testing.assert_allclose(attention[batch, head], masses, atol=1e-9)


def test_watching_leaves_nothing_behind() -> None:
    model, ids = model_of("KNA"), ids_of(1, 8)
    before = model(ids)
    hooks = [len(module._forward_hooks) for module in model.modules()]
    with observe_scores(model, lambda seen: None):
        assert torch.equal(model(ids), before)

    def fail(seen: LayerInputs) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), observe_scores(model, fail):
        model(ids)
    assert [len(module._forward_hooks) for module in model.modules()] == hooks
    assert torch.equal(model(ids), before)


def test_what_cannot_be_looked_at_is_refused() -> None:
    with pytest.raises(InputError, match="no Score"), observe_scores(torch.nn.Linear(2, 2), print):
        pass
    model = model_of("Baseline")
    with model.using("ReRoPE"), pytest.raises(InputError, match="switch off the method"):
        look(model, ids_of(1, 20))
    with pytest.raises(InputError, match="has a forgetting gate"):
        look(model_of("KNA-FoX"), ids_of(1, 8))


def texts_of(length: int = 64) -> EvaluationSet:
    windows = np.random.default_rng(3).integers(40, size=(5, length + 1))
    return EvaluationSet("non_repeated", length, 16, windows, ["b", "a", "b", "c", "c"])


def of(record: pl.DataFrame, statistic: str, **at: Any) -> pl.DataFrame:
    return record.filter(statistic=statistic, **at).sort("unit", "bin")


@pytest.mark.parametrize("score", ["KNA", "QKRMSNorm"])
def test_a_record_is_the_sum_of_its_texts(score: str) -> None:
    model, texts = model_of(score), texts_of()
    modes = [module.training for module in model.modules()]
    record = measure_mechanism(model, texts, seed=0, weights="w")
    assert [module.training for module in model.modules()] == modes
    small = measure_mechanism(model, texts, seed=0, weights="w", tokens_per_batch=1)
    assert measurements.sorted_rows(small).equals(measurements.sorted_rows(record))
    assert of(record, "spread", length=16, layer=0, head=0)["of"].to_list() == [1, 2, 2]
    of_b = [torch.from_numpy(texts.windows[row : row + 1]) for row in (0, 2)]
    for layer, head in np.ndindex(2, 4):
        total = 0.0
        for ids in of_b:
            seen = look(model, ids[:, :16])[layer]
            norms = seen.inputs.k[0, head // 2].norm(dim=-1)[:9]
            received = received_attention(seen, 8)[0, head]
            total += float(rank_correlation(norms, received)) if score != "KNA" else 0.0
        at = {"unit": "b", "layer": layer, "head": head}
        correlation = of(record, "correlation", **at)
        assert correlation["sum"].item() == pytest.approx(total, abs=1e-9)
        assert correlation["of"].item() == (0 if score == "KNA" else 2)
        seen = look(model, torch.cat(of_b)[:, :64])[layer]
        counts = count_cosines(seen).counts[:, head].sum(0)
        assert of(record, "cosine", length=64, **at)["sum"].to_list() == counts.tolist()

    view = View(record)
    shown = rows(view)[0]
    cells = {column.key: column.cell(view, shown) for column in columns(view)}
    assert (cells["correlation"].text == "one norm") == (score == "KNA")
    below, edges = [], np.linspace(-1, 1, BINS + 1)
    for layer, head in np.ndindex(2, 4):
        of_head = of(record, "cosine", length=16, layer=layer, head=head)
        summed = of_head.group_by("bin").agg(pl.col("sum").sum()).sort("bin")["sum"]
        below.append(np.array([0.0, *summed.cum_sum()]))
    for key in (key for key in cells if key.startswith("cosine_near_")):
        share, quantile = float(key.removeprefix("cosine_near_")), cells[key].estimate
        # Linear in a bin; of empty ones that follow, none.
        by_head = [np.interp(share * each[-1] - 1e-9, each, edges) for each in below]
        assert quantile is not None
        assert quantile.value == pytest.approx(np.mean(by_head), abs=1e-9)
        assert quantile.low is not None
        assert quantile.low <= quantile.value


@pytest.mark.parametrize("length", [6, 7, 31])
def test_norms_rank_with_positions_and_with_anything(length: int) -> None:
    """As scipy's Spearman; rounding does not rank equal norms."""
    norms = np.random.default_rng(length).integers(1, 9, size=(3, 2, length)).astype(float)
    rounded = norms + np.linspace(0, 1e-7, length)
    found = position_correlation(torch.from_numpy(norms))
    np.testing.assert_array_equal(found, position_correlation(torch.from_numpy(rounded)))
    for at in np.ndindex(3, 2):
        rest = norms[at][4:]
        if len(set(rest)) == 1:
            assert math.isnan(found[at])
            continue
        expected = stats.spearmanr(rest, np.arange(len(rest))).statistic
        assert float(found[at]) == pytest.approx(expected, abs=1e-12)
    other = np.roll(norms, 1, axis=-1)[0, 0]
    ranked = rank_correlation(torch.from_numpy(norms[0, 0]), torch.from_numpy(other))
    expected = stats.spearmanr(norms[0, 0], other).statistic
    assert float(ranked) == pytest.approx(expected, abs=1e-12)


def test_the_energy_in_the_mean_key() -> None:
    keys = np.random.default_rng(3).normal(size=(2, 3, 7, 5)) + 1.0
    found = mean_direction(torch.from_numpy(keys))
    for at in np.ndindex(2, 3):
        units = [key / math.sqrt((key * key).sum()) for key in keys[at]]
        mean = sum(units) / 7
        assert float(found[at]) == pytest.approx(float((mean * mean).sum()), rel=1e-12)
    same = torch.arange(1.0, 8.0)[:, None] * torch.ones(5)
    assert mean_direction(same[None, None]).item() == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("length", "edges"), [(64, [0, 1, 2, 4, 8, 16, 32, 64]), (50, [0, 1, 2, 4, 8, 16, 32, 50])]
)
def test_octaves_of_distance_begin_at_the_training_length(length: int, edges: list[int]) -> None:
    assert distance_octaves(16, length) == edges
    record = measure_mechanism(model_of("KNA"), texts_of(length), seed=0, weights="w")
    kept = of(record, "product", layer=1, head=3, unit="b")
    assert [*kept["bin"].to_list(), kept["bin_end"][-1]] == edges
    assert kept["of"].sum() == 2 * length * (length + 1) / 2  # the pairs of document b's two texts
    # Metrics that are made one after another, as a figure does, each read their own distances.
    view, at = View(record), {"row": "KNA", "protocol": "mechanism", "length": length}
    for low, high in pairwise(edges):
        part = record.filter(statistic="product", bin=float(low))
        found = view.finite_estimate(product_between(low, high), at)
        assert found is not None
        total, count = part["sum"].to_numpy().sum(), part["of"].to_numpy().sum()
        assert found.value == pytest.approx(total / count, abs=1e-8)


def test_the_trained_range() -> None:
    values = np.random.default_rng(2).normal(0.1, 0.2, size=20_000).clip(-1, 1)
    edges = np.linspace(-1, 1, BINS + 1)
    inside = trained_range(np.histogram(values, bins=edges)[0].astype(float))
    low, high = np.quantile(values, [TAIL, 1 - TAIL])
    expected = (edges[1:] > low) & (edges[:-1] < high)
    assert np.abs(np.flatnonzero(inside)[[0, -1]] - np.flatnonzero(expected)[[0, -1]]).max() <= 1


@pytest.mark.parametrize("score", ["KNA", "QKRMSNorm"])
def test_a_record_holds_them_by_document(score: str) -> None:
    model, constant = model_of(score), score == "KNA"
    texts = replace(texts_of(), documents=["b", "a", "b", "c", "d"])
    record = measure_mechanism(model, texts, seed=0, weights="w")
    keys = [seen.inputs.k for seen in look(model, torch.from_numpy(texts.windows[:, :16]))]
    for layer, head in np.ndindex(2, 2):
        norms = keys[layer][:, head, 4:].norm(dim=-1).numpy()
        # To five digits: a token that comes twice has one norm, whatever rotating leaves.
        ranked = np.round(norms / norms.mean(1, keepdims=True), 5)
        sums = dict.fromkeys("abcd", 0.0)
        for name, row in zip(texts.documents, ranked, strict=True):
            sums[name] += 0.0 if constant else stats.spearmanr(row, np.arange(12)).statistic
        found = of(record, "position", layer=layer, head=head)
        np.testing.assert_allclose(found["sum"], [*sums.values()], atol=1e-9)
        assert found["of"].to_list() == ([0] * 4 if constant else [1, 2, 1, 1])
        signed = of(record, "position_size", layer=layer, head=head)["sum"].to_list()
        # Documents a and c give the sign, b and d are measured.
        sign = np.sign(sums["a"] + sums["c"])
        expected = [0.0, sums["b"] * sign, 0.0, sums["d"] * sign]
        np.testing.assert_allclose(signed, expected, atol=1e-9)
    assert record.filter(statistic="position")["head"].n_unique() == 2  # of keys


def last_scores(model: CausalLM, ids: np.ndarray) -> tuple[int, float]:
    """How many of the last 16 tokens are right, and what they lose in all."""
    with torch.no_grad():
        logits = model(torch.from_numpy(ids[None, :-1]))[0, -16:].numpy()
    targets = ids[-16:]
    losses = np.log(np.exp(logits).sum(-1)) - logits[np.arange(16), targets]
    return int((logits.argmax(-1) == targets).sum()), float(losses.sum())


@pytest.mark.parametrize("score", ["Baseline", "KNA-NoPE", "Baseline-ALiBi"])
def test_a_record_holds_the_readings_by_document(score: str) -> None:
    model, texts = model_of(score), texts_of()
    record = measure_mechanism(model, texts, seed=0, weights="w")
    assert model.spec == model.config.score.resolve(train_length=16)  # no method stays on
    for number, reading in enumerate(READINGS):
        at = {"length": 64, "bin": float(number), "unit": "b"}
        hits, loss = (of(record, f"last_{name}", **at) for name in ("accuracy", "loss"))
        clamped = reading == "clamped"
        if clamped and score != "Baseline":  # Nothing rotary is left to clamp.
            assert hits["of"].item() == loss["of"].item() == 0
            continue
        assert hits["of"].item() == loss["of"].item() == 32
        first = -17 if reading == "alone" else 0
        with model.using("ReRoPE", window=15) if clamped else nullcontext():
            of_b = [texts.windows[row, first:] for row in (0, 2)]
            expected = [last_scores(model, window) for window in of_b]
        assert hits["sum"].item() == sum(right for right, _ in expected)
        assert loss["sum"].item() == pytest.approx(sum(nats for _, nats in expected), rel=1e-9)
