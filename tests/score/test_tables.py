"""Kept tables: a result does not depend on what ran before, in which mode, or on what device."""

from __future__ import annotations

import copy
import pickle
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from normattn import Score, attention
from normattn.layers import attention as attention_module
from normattn.layers import plan
from normattn.score import positions, rotary

from .cases import tensors

TEXTS = (
    *("KNA", "KNA-RoPE(base=500)", "KNA-RoPE(layout=interleaved)", "Baseline", "QNA"),
    *("KNA-logn@8", "KNA-logn@16", "KNA-logn+@8", "KNA-NoPE-logn@8", "KNA-NTK(factor=4)"),
    *("KNA-YaRN(factor=2)@8", "KNA-YaRN(factor=4)@8", "KNA-YaRN(factor=4)@16"),
    *("KNA-PI(factor=4)", "KNA-ReRoPE(window=3)", "KNA-ReRoPE(window=4)"),
)


def _forget() -> None:
    rotary._cached_tables.cache_clear()
    positions._consecutive.cache_clear()
    plan._PLANS.clear()
    attention_module._SCORES.clear()


def _call(
    text: str = "KNA-logn@8",
    queries: int = 5,
    keys: int = 5,
    causal: bool = True,
    d: int = 4,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """One use of `attention` with everything that decides its tables."""
    q, k, v = tensors(*[(1, 1, n, d) for n in (queries, keys, keys)], dtype=dtype)
    return attention(q, k, v, text, causal=causal)


def test_what_ran_before_does_not_matter() -> None:
    """Each call after a neighbour that differs in one thing only, and then in any order."""
    others: dict[str, Any] = {"queries": (1, 3), "keys": (9,), "causal": (False,), "d": (8, 2)}
    others |= {"dtype": (torch.float64, torch.bfloat16), "text": TEXTS}
    calls: list[dict[str, Any]] = [{}]
    calls += [{name: value} for name, values in others.items() for value in values]
    fresh = []
    for call in calls:
        _forget()
        fresh.append(_call(**call))
    for call, expected in zip(calls, fresh, strict=True):
        _forget()
        _call()
        assert torch.equal(_call(**call), expected), call
        assert torch.equal(_call(), fresh[0]), call
    order = [*range(len(calls))] * 4
    random.Random(0).shuffle(order)
    for n in order:
        assert torch.equal(_call(**calls[n]), fresh[n]), calls[n]


@pytest.mark.parametrize("text", TEXTS)
def test_inference_first_then_training(text: str) -> None:
    q, k, v = tensors(*[(1, 1, 6, 4)] * 3)
    for causal in (True,) if "ReRoPE" in text else (True, False):
        _forget()
        with torch.inference_mode():
            first = attention(q, k, v, text, causal=causal)
        out = attention(q, k, v, text, causal=causal)
        assert torch.equal(out, first)
        grads = torch.autograd.grad(out.sum(), (q, k, v))
        _forget()
        again = torch.autograd.grad(attention(q, k, v, text, causal=causal).sum(), (q, k, v))
        assert all(map(torch.equal, grads, again))


def test_tables_are_shared_by_layers_and_explicit_positions_are_never_kept() -> None:
    _forget()
    q, k, v = tensors(*[(1, 2, 6, 4)] * 3, dtype=torch.float32)
    where = torch.arange(6)
    first, second = (
        attention(q, k, v, "KNA-logn@4", q_positions=where + n, k_positions=where + n)
        for n in (0, 5)
    )
    assert (first - second).abs().max() > 1e-6
    attention(q, k, v, "KNA", key_padding=torch.arange(6)[None] < 2)
    assert rotary._cached_tables.cache_info().currsize == 0
    for score in [Score("KNA-logn@8", 2, 4) for _ in range(3)]:
        attention(q, k, v, score)
    assert rotary._cached_tables.cache_info().misses == 2  # of queries and of keys


def test_a_copied_or_restored_score_gives_the_same() -> None:
    q, k, v = tensors(*[(1, 2, 6, 4)] * 3, dtype=torch.float32)
    score = Score("QKRMSNorm-YaRN(factor=2)@8", 2, 4)
    for again in (copy.deepcopy(score), pickle.loads(pickle.dumps(score))):
        assert torch.equal(attention(q, k, v, again), attention(q, k, v, score))


def test_threads_share_the_tables() -> None:
    """More tables than are kept, asked for by threads that evict each other's."""
    _forget()
    q, k, v = tensors(*[(1, 1, 3, 4)] * 3, dtype=torch.float32)

    def results(_: int) -> list[Tensor]:
        return [attention(q, k, v, f"KNA-logn@{length}").detach() for length in range(2, 70)]

    expected = results(0)
    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(results, range(8)):
            assert all(map(torch.equal, found, expected))
