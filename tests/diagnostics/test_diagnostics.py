"""Diagnostics against a double loop in float64, and that watching leaves nothing behind."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from normattn.errors import InputError
from normattn.lab.data.windows import EvaluationSet
from normattn.lab.diagnostics import (
    BINS,
    Seen,
    count_cosines,
    measure_mechanism,
    rank_correlation,
    received_attention,
    watching,
)
from normattn.lab.report.view import View
from normattn.lab.stats import Bootstrap, measurements
from normattn.lab.studies.mechanism import columns, rows
from normattn.models import CausalLM, CausalLMConfig

NAMES = (
    "Baseline",
    "KNA-logn",
    "CosA",
    "QKRMSNorm",
    "QKLayerNorm(gain=false)",
    "KNA-NoPE",
    "Baseline-ALiBi",
    "Baseline-SoftCap(cap=2)",
    "Baseline-Sink",
    "Baseline-SlidingWindow(window=5)",
    "KNA-Chunked(size=6)",
)


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


def look(model: CausalLM, ids: Tensor) -> list[Seen]:
    found: list[Seen] = []
    with watching(model, found.append), torch.no_grad():
        model(ids)
    return found


def ids_of(rows: int, length: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(0).integers(40, size=(rows, length)))


def brute_weights(seen: Seen, batch: int, head: int) -> list[list[float]]:
    """α by the definition, one pair at a time."""
    p = seen.inputs
    q, k = p.q[batch, head], p.k[batch, head // (p.q.shape[1] // p.k.shape[1])]
    rows = []
    for i in range(q.shape[0]):
        scores = []
        for j in range(i + 1):
            s = (q[i] @ k[j]).item()
            s = p.cap * math.tanh(s / p.cap) if p.cap is not None else s
            s += p.bias[head, i - j].item() if p.bias is not None else 0.0
            hidden = (
                p.visibility.window is not None
                and i - j >= p.visibility.window
                and j >= p.visibility.kept
            )
            own, others = p.visibility.query_documents, p.visibility.key_documents
            if own is not None and others is not None:  # chunks
                hidden = hidden or bool(own[batch, i] != others[batch, j])
            scores.append(-math.inf if hidden else s)
        sink = math.exp(p.sink[head].item()) if p.sink is not None else 0.0
        total = sum(math.exp(s) for s in scores) + sink
        rows.append([math.exp(s) / total for s in scores])
    return rows


LENGTHS = [*((name, 20) for name in NAMES), ("KNA-logn", 70), ("Baseline-Sink", 70)]
"""Some texts are longer than the blocks of rows that are held at once."""


@pytest.mark.parametrize(("score", "length"), LENGTHS)
def test_received_attention(score: str, length: int) -> None:
    for seen in look(model_of(score), ids_of(2, length)):
        weights = {at: brute_weights(seen, *at) for at in ((0, 0), (1, 3))}
        for horizon in (1, length // 2, length):
            found = received_attention(seen, horizon)
            assert found.shape == (2, 4, length - horizon + 1)
            for at, own in weights.items():
                expected = [
                    sum(own[i][j] * (i + 1) for i in range(j, j + horizon)) / horizon
                    for j in range(length - horizon + 1)
                ]
                np.testing.assert_allclose(found[at], expected, rtol=1e-9)


@pytest.mark.parametrize("score", NAMES)
def test_cosines(score: str) -> None:
    length = 30
    for seen in look(model_of(score), ids_of(2, length)):
        found = count_cosines(seen)
        p = seen.inputs
        for batch, head in ((0, 1), (1, 2)):
            q, k = p.q[batch, head], p.k[batch, head // 2]
            values = [
                float(torch.nn.functional.cosine_similarity(q[i], k[j], dim=0))
                for i in range(length)
                for j in range(i + 1)
                if p.visibility.window is None or i - j < p.visibility.window
                if "Chunked" not in score or i // 6 == j // 6
            ]
            counts = np.histogram(values, bins=np.linspace(-1, 1, BINS + 1))[0]
            difference = np.abs(found.counts[batch, head].numpy() - counts)
            # A cosine on an edge may fall to either side.
            assert difference.sum() <= 2
            assert found.counts[batch, head].sum() == len(values)
            assert float(found.least[batch, head]) == pytest.approx(min(values), abs=1e-12)
            assert float(found.most[batch, head]) == pytest.approx(max(values), abs=1e-12)


def brute_ranks(values: list[float]) -> list[float]:
    return [
        sum(other < value for other in values) + (sum(other == value for other in values) - 1) / 2
        for value in values
    ]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=2, max_size=12))
def test_rank_correlation(pairs: list[tuple[int, int]]) -> None:
    a, b = ([float(pair[side]) for pair in pairs] for side in (0, 1))
    found = float(rank_correlation(torch.tensor(a), torch.tensor(b)))
    x, y = np.array(brute_ranks(a)), np.array(brute_ranks(b))
    x, y = x - x.mean(), y - y.mean()
    if not (x @ x and y @ y):
        assert math.isnan(found)
    else:
        assert found == pytest.approx(float(x @ y / math.sqrt((x @ x) * (y @ y))), abs=1e-12)


def test_watching_leaves_nothing_behind() -> None:
    model = model_of("KNA")
    ids = ids_of(1, 8)
    before = model(ids)
    hooks = [len(module._forward_hooks) for module in model.modules()]
    with watching(model, lambda seen: None):
        assert torch.equal(model(ids), before)

    def fail(seen: Seen) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), watching(model, fail):
        model(ids)
    assert [len(module._forward_hooks) for module in model.modules()] == hooks
    assert torch.equal(model(ids), before)


def test_what_cannot_be_looked_at_is_refused() -> None:
    with pytest.raises(InputError, match="holds no Score"), watching(torch.nn.Linear(2, 2), print):
        pass
    model = model_of("Baseline")
    with model.using("ReRoPE"), pytest.raises(InputError, match="switch the method off"):
        look(model, ids_of(1, 20))
    with pytest.raises(InputError, match="has a forgetting gate"):
        look(model_of("KNA-FoX"), ids_of(1, 8))
    seen = look(model, ids_of(1, 8))[0]
    with pytest.raises(InputError, match="a horizon must lie in 1 … 8"):
        received_attention(seen, 9)


def texts_of(length: int = 64) -> EvaluationSet:
    windows = np.random.default_rng(3).integers(40, size=(5, length + 1))
    return EvaluationSet("non_repeated", length, 16, windows, ["b", "a", "b", "c", "c"])


@pytest.mark.parametrize("score", ["Baseline", "KNA", "QKRMSNorm"])
def test_a_record_is_the_sum_of_its_texts(score: str) -> None:
    model, texts = model_of(score), texts_of()
    modes = [module.training for module in model.modules()]
    record = measure_mechanism(model, texts, seed=0, weights="w")
    assert [module.training for module in model.modules()] == modes
    small = measure_mechanism(model, texts, seed=0, weights="w", tokens_per_batch=1)
    assert measurements.sorted_rows(small).equals(measurements.sorted_rows(record))

    def of(statistic: str, length: int, document: str, layer: int, head: int) -> pl.DataFrame:
        chosen = record.filter(statistic=statistic, length=length, unit=document)
        return chosen.filter(layer=layer, head=head).sort("bin")

    assert [of("spread", 16, name, 0, 0)["of"].item() for name in "abc"] == [1, 2, 2]

    def one(row: int) -> Tensor:
        return torch.from_numpy(texts.windows[row : row + 1])

    for layer in range(2):
        for head in range(4):
            total = 0.0
            for row in (0, 2):  # the texts of document b
                seen = look(model, one(row)[:, :16])[layer]
                norms = seen.inputs.k[0, head // 2].norm(dim=-1)[:9]
                received = received_attention(seen, 8)[0, head]
                total += float(rank_correlation(norms, received)) if score != "KNA" else 0.0
            correlation = of("correlation", 16, "b", layer, head)
            assert correlation["sum"].item() == pytest.approx(total, abs=1e-9)
            assert correlation["of"].item() == (0 if score == "KNA" else 2)
            far = [count_cosines(look(model, one(r)[:, :64])[layer]).counts for r in (0, 2)]
            counts = of("cosine", 64, "b", layer, head)["sum"].to_list()
            assert counts == sum(far)[0, head].tolist()  # type: ignore[index]

    view = View(record, Bootstrap(50))
    shown = rows(view)[0]
    cells = {column.key: column.cell(view, shown) for column in columns(view)}
    assert (cells["correlation"].text == "one norm") == (score == "KNA")
    near = [
        np.sum([of("cosine", 16, name, layer, head)["sum"].to_list() for name in "abc"], axis=0)
        for layer in range(2)
        for head in range(4)
    ]
    median = cells["cosine_near_0.5"].estimate
    assert median is not None
    assert median.value == pytest.approx(np.mean([_quantile(head, 0.5) for head in near]), abs=1e-9)
    assert median.low is not None
    assert median.low <= median.value


def _quantile(counts: np.ndarray, share: float) -> float:
    """Linear within the bin that holds it."""
    wanted, below = share * counts.sum(), 0
    for index, count in enumerate(counts):
        if below + count >= wanted:
            return float(-1 + 2 * (index + (wanted - below) / count) / BINS)
        below += count
    raise AssertionError
