"""Kept tables: a result does not depend on what ran before, in which mode, or on what device."""

from __future__ import annotations

import copy
import io
import pickle
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from normattn import Score, attention
from normattn.kernels import AttentionMask
from normattn.layers import prepare
from normattn.score import rotary
from normattn.score.table_cache import TableCache

from .cases import tensors

TEXTS = (
    "KNA",
    "KNA-RoPE(base=500)",
    "KNA-RoPE(layout=interleaved)",
    "KNA-logn@8",
    "KNA-logn@16",
    "KNA-logn+@8",
    "KNA-NoPE-logn@8",
    "KNA-YaRN(factor=2)@8",
    "KNA-YaRN(factor=4)@8",
    "KNA-YaRN(factor=4)@16",
    "KNA-NTK(factor=4)",
    "KNA-PI(factor=4)",
    "KNA-ReRoPE(window=3)",
    "KNA-ReRoPE(window=4)",
    "Baseline",
    "QNA",
)


def _forget() -> None:
    rotary._CACHE.clear()
    prepare._TABLES.clear()
    prepare._counted.cache_clear()
    prepare._built.cache_clear()


@dataclass(frozen=True)
class Call:
    """One use of `attention` with everything that decides its tables."""

    text: str
    queries: int
    keys: int
    causal: bool
    d: int
    dtype: torch.dtype

    def __call__(self) -> Tensor:
        shapes = [(1, 1, n, self.d) for n in (self.queries, self.keys, self.keys)]
        q, k, v = tensors(*shapes, dtype=self.dtype)
        return attention(q, k, v, self.text, causal=self.causal)


def test_what_ran_before_does_not_matter() -> None:
    """Each call after a neighbour that differs in one thing only, and then in any order."""
    base = Call("KNA-logn@8", 5, 5, True, 4, torch.float32)
    others: dict[str, Any] = {
        "queries": (1, 3),
        "keys": (9,),
        "causal": (False,),
        "d": (8, 2),
        "dtype": (torch.float64, torch.bfloat16),
        "text": TEXTS,
    }
    calls = [base, *(replace(base, **{k: v}) for k, values in others.items() for v in values)]
    fresh = []
    for call in calls:
        _forget()
        fresh.append(call())
    for call, expected in zip(calls, fresh, strict=True):
        _forget()
        base()
        assert torch.equal(call(), expected), call
        assert torch.equal(base(), fresh[0]), call
    order = [*range(len(calls))] * 4
    random.Random(0).shuffle(order)
    for n in order:
        assert torch.equal(calls[n](), fresh[n]), calls[n]
    assert len(rotary._CACHE) <= rotary._CACHE.most


@pytest.mark.parametrize("text", TEXTS)
def test_inference_first_then_training(text: str) -> None:
    _forget()
    q, k, v = tensors((1, 1, 6, 4), (1, 1, 6, 4), (1, 1, 6, 4))
    causal_ways = (True,) if "ReRoPE" in text else (True, False)
    for causal in causal_ways:
        with torch.inference_mode():
            first = attention(q, k, v, text, causal=causal)
        out = attention(q, k, v, text, causal=causal)
        assert torch.equal(out, first)
        grads = torch.autograd.grad(out.sum(), (q, k, v))
        _forget()
        again = attention(q, k, v, text, causal=causal)
        for one, two in zip(grads, torch.autograd.grad(again.sum(), (q, k, v)), strict=True):
            assert torch.equal(one, two)


def test_tables_are_made_once_and_shared_by_layers() -> None:
    _forget()
    scores = [Score("KNA-logn@8", 2, 4) for _ in range(3)]
    q, k, v = tensors((1, 2, 6, 4), (1, 2, 6, 4), (1, 2, 6, 4), dtype=torch.float32)
    for score in scores:
        attention(q, k, v, score)
    assert len(rotary._CACHE) == 2  # one for queries, one for keys


def test_explicit_positions_are_never_kept() -> None:
    _forget()
    q, k, v = tensors((1, 2, 6, 4), (1, 2, 6, 4), (1, 2, 6, 4))
    where = torch.arange(6)
    first = attention(q, k, v, "KNA-logn@4", q_positions=where, k_positions=where)
    second = attention(q, k, v, "KNA-logn@4", q_positions=where + 5, k_positions=where + 5)
    assert (first - second).abs().max() > 1e-6
    padding = torch.arange(6)[None] < 2
    attention(q, k, v, "KNA", key_padding=padding)
    assert not rotary._CACHE


def test_another_device_has_tables_of_its_own() -> None:
    _forget()
    q, k, v = tensors((1, 2, 6, 4), (1, 2, 6, 4), (1, 2, 6, 4), dtype=torch.float32)
    expected = attention(q, k, v, "KNA-logn@8")
    shapes = [x.detach().to("meta") for x in (q, k, v)]
    _forget()
    at = prepare.regular_positions(6, 6, torch.device("meta"))
    seen = AttentionMask(True, at.query, at.key, aligned=True)
    assert Score("KNA-logn@8", 2, 4)(*shapes, at, seen).q.device.type == "meta"
    assert rotary._CACHE
    assert torch.equal(attention(q, k, v, "KNA-logn@8"), expected)


def test_a_copied_or_restored_score_gives_the_same() -> None:
    q, k, v = tensors((1, 2, 6, 4), (1, 2, 6, 4), (1, 2, 6, 4), dtype=torch.float32)
    score = Score("QKRMSNorm-YaRN(factor=2)@8", 2, 4)
    expected = attention(q, k, v, score)
    assert torch.equal(attention(q, k, v, copy.deepcopy(score)), expected)
    file = io.BytesIO()
    torch.save(score, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert torch.equal(attention(q, k, v, loaded), expected)


def test_threads_share_the_tables() -> None:
    """More tables than are kept, asked for by threads that evict each other's."""
    _forget()
    lengths = list(range(2, 70))

    def results(_: int) -> list[Tensor]:
        found = []
        for length in lengths:
            q, k, v = tensors(*[(1, 1, 3, 4)] * 3, dtype=torch.float32)
            found.append(attention(q, k, v, f"KNA-logn@{length}").detach())
        return found

    expected = results(0)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            every = list(pool.map(results, range(8)))
    finally:
        sys.setswitchinterval(before)
    for found in every:
        assert all(map(torch.equal, found, expected))


def test_copied_tables_start_empty() -> None:
    kept: TableCache[rotary.RotaryTables] = TableCache(3)
    kept[1,] = None  # type: ignore[assignment]
    for again in (copy.deepcopy(kept), pickle.loads(pickle.dumps(kept))):
        assert type(again) is TableCache
        assert (len(again), again.most) == (0, 3)
    assert len(kept) == 1
