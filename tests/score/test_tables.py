"""Kept tables: a result does not depend on what ran before, in which mode, or on what device."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from normattn import Score, attention
from normattn.layers import attend
from normattn.score import module

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
    module._KEPT.clear()
    attend._regular.cache_clear()
    attend._built.cache_clear()


def _call(text: str, queries: int, keys: int, causal: bool, d: int, dtype: torch.dtype) -> Tensor:
    q, k, v = tensors((1, 1, queries, d), (1, 1, keys, d), (1, 1, keys, d), dtype=dtype)
    return attention(q, k, v, text, causal=causal)


def test_any_order_gives_what_a_fresh_start_gives() -> None:
    calls = [
        (text, queries, keys, causal, d, dtype)
        for text in TEXTS
        for queries, keys in ((5, 5), (5, 9), (9, 9))
        for causal in (True, False)
        for d in (4, 8)
        for dtype in (torch.float32, torch.float64, torch.bfloat16)
        if causal or "ReRoPE" not in text
    ]
    generator = random.Random(0)
    calls = generator.sample(calls, 120)
    fresh = []
    for call in calls:
        _forget()
        fresh.append(_call(*call))
    order = [*range(len(calls)), *range(len(calls))]
    generator.shuffle(order)
    for n in order:
        assert torch.equal(_call(*calls[n]), fresh[n]), calls[n]
    assert len(module._KEPT) <= module._KEPT_AT_MOST


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
    assert len(module._KEPT) == 1


def test_explicit_positions_are_never_kept() -> None:
    _forget()
    q, k, v = tensors((1, 2, 6, 4), (1, 2, 6, 4), (1, 2, 6, 4))
    where = torch.arange(6)
    first = attention(q, k, v, "KNA-logn@4", q_positions=where, k_positions=where)
    second = attention(q, k, v, "KNA-logn@4", q_positions=where + 5, k_positions=where + 5)
    assert (first - second).abs().max() > 1e-6
    padding = torch.arange(6)[None] < 2
    attention(q, k, v, "KNA", key_padding=padding)
    assert not module._KEPT


def test_another_device_has_tables_of_its_own() -> None:
    _forget()
    q, k, v = tensors((1, 2, 6, 4), (1, 2, 6, 4), (1, 2, 6, 4), dtype=torch.float32)
    expected = attention(q, k, v, "KNA-logn@8")
    shapes = [x.detach().to("meta") for x in (q, k, v)]
    _forget()
    assert attention(shapes[0], shapes[1], shapes[2], "KNA-logn@8").device.type == "meta"
    assert torch.equal(attention(q, k, v, "KNA-logn@8"), expected)


def test_a_copied_or_restored_score_gives_the_same() -> None:
    import copy
    import io

    q, k, v = tensors((1, 2, 6, 4), (1, 2, 6, 4), (1, 2, 6, 4), dtype=torch.float32)
    score = Score("QKRMSNorm-YaRN(factor=2)@8", 2, 4)
    expected = attention(q, k, v, score)
    assert torch.equal(attention(q, k, v, copy.deepcopy(score)), expected)
    file = io.BytesIO()
    torch.save(score, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert torch.equal(attention(q, k, v, loaded), expected)
