"""Dropout of attention weights: the same mask in both directions, the right expectation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from normattn import attention
from normattn.kernels import reference, tiled
from score import oracle
from score.cases import tensors
from score.oracle import Recipe

RECIPES = {
    "one regime": (Recipe("KNA"), "chunked"),
    "two regimes": (Recipe("QNA", "", method="ReRoPE", window=3), "chunked"),
    "strips": (Recipe("KNA", "", "none", normaliser="StickBreaking"), "strips"),
}


def _weights(
    recipe: Recipe, q: Tensor, k: Tensor, rate: float, seed: int, backend: str, causal: bool = True
) -> Tensor:
    """The dropped attention weights, read off by values that are unit vectors."""
    torch.manual_seed(seed)
    unit = torch.eye(k.shape[2], dtype=k.dtype).expand(*k.shape[:2], -1, -1)
    return attention(q, k, unit, recipe.text, causal, dropout_p=rate, backend=backend)


@pytest.mark.parametrize("case", RECIPES)
def test_forward_and_backward_drop_the_same(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiled, "ROWS", 4)
    monkeypatch.setattr(reference, "STRIP_BYTES", 1)
    recipe, backend = RECIPES[case]
    q, k, v = tensors(*[(2, 2, 10, 4)] * 3)
    whole = _weights(recipe, q, k, 0.0, 0, backend).detach()
    dropped, other = (_weights(recipe, q, k, 0.3, seed, backend).detach() for seed in (7, 8))
    assert not torch.equal(dropped, other)
    drop = torch.where(dropped == 0, 0.0, 1 / 0.7).double()
    torch.testing.assert_close(dropped, whole * drop)
    assert 0.1 < 1 - (dropped != 0).sum() / (whole != 0).sum() < 0.5

    torch.manual_seed(7)
    out = attention(q, k, v, recipe.text, dropout_p=0.3, backend=backend)
    expected = oracle.attend(recipe, q, k, v, drop=drop)
    torch.testing.assert_close(out, expected)
    torch.randn(3)  # the global stream moves on between forward and backward
    ours = torch.autograd.grad(out.square().sum(), (q, k, v))
    hand = torch.autograd.grad(expected.square().sum(), (q, k, v))
    torch.testing.assert_close(ours, hand)


@pytest.mark.parametrize("case", ["one regime", "two regimes"])
@pytest.mark.parametrize("backend", ["reference", "chunked", "auto"])
def test_the_expectation_is_no_dropout(case: str, backend: str) -> None:
    recipe, _ = RECIPES[case]
    with torch.no_grad():
        q, k = tensors((1, 1, 6, 4), (1, 1, 6, 4))
        many = [x.expand(4000, -1, -1, -1) for x in (q, k)]
        whole = _weights(recipe, q, k, 0.0, 0, backend)
        mean = _weights(recipe, many[0], many[1], 0.25, 1, backend).mean(0, keepdim=True)
    # One weight w has a deviation of w·√(0.25/0.75) per draw; 5 of the mean's deviations.
    assert ((mean - whole).abs() <= 5 * whole * (1 / 3) ** 0.5 / 4000**0.5 + 1e-12).all()


@pytest.mark.parametrize("backend", ["reference", "chunked", "fused"])
def test_rate_0_is_exact_and_draws_nothing(backend: str) -> None:
    q, k, v = tensors(*[(1, 2, 6, 4)] * 3)
    before = torch.get_rng_state()
    out = attention(q, k, v, "KNA", dropout_p=0.0, backend=backend)
    assert torch.equal(out, attention(q, k, v, "KNA", backend=backend))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("budget", [1, 2**20])
def test_no_two_blocks_are_dropped_alike(budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tiles, heads and rows: a seed reused by every tile would make them."""
    monkeypatch.setattr(tiled, "ROWS", 8)
    monkeypatch.setattr(tiled, "TILE_BYTES", budget)
    q, k = tensors((2, 2, 32, 4), (2, 2, 32, 4))
    kept = _weights(Recipe("KNA", position="none"), q, k, 0.5, 0, "chunked", causal=False) != 0
    blocks = [kept[b, h, i : i + 8, :8] for b in (0, 1) for h in (0, 1) for i in (0, 8, 16, 24)]
    for n, block in enumerate(blocks):
        assert all(not torch.equal(block, other) for other in blocks[:n])
