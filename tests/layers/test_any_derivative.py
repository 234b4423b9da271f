"""Derivatives of every kind: torch.func, forward mode, finite differences to the second order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, func
from torch.autograd import forward_ad, gradcheck, gradgradcheck

from normattn import InputError, attention
from score.cases import built, tensors
from score.recipe import Recipe

RECIPES = [
    Recipe("Baseline"),
    Recipe("Baseline", "", "interleaved", "YaRN"),
    Recipe("CosA", "logn", train_length=4),
    Recipe("KNA", method="ReRoPE", window=2),
    Recipe("QKNorm2020"),
    Recipe("QKRMSNorm", gain=True),
    Recipe("QKRMSNorm", across="all"),
    Recipe("QKLayerNorm", gain=True),
    Recipe("Baseline", "", "none", bias="KERPLEPower"),
    Recipe("Baseline", "", "none", bias="ALiBi", sink=True, cap=2.0),
]
every_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=[r.text for r in RECIPES])
B, H, T, D = 3, 2, 5, 4


def _run(recipe: Recipe, backend: str = "reference") -> tuple[Callable[..., Tensor], list[Tensor]]:
    score = built(recipe, H, D, 1)
    score.requires_grad_(False)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, score, backend=backend)

    return run, [x.detach() for x in tensors((B, H, T, D), (B, 1, T, D), (B, 1, T, D))]


@every_recipe
@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_derivatives_of_every_kind(recipe: Recipe, backend: str) -> None:
    """Forward mode, jvp, vmap and per-sample gradients against ordinary backward passes."""
    run, (q, k, v) = _run(recipe, backend)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    along = [torch.randn(x.shape, dtype=x.dtype) for x in (q, k, v)]
    expected = torch.autograd.grad(run(*leaves).square().sum(), leaves)
    slope = sum((one * other).sum() for one, other in zip(expected, along, strict=True))

    jvp: Any = func.jvp
    out, by = jvp(lambda *x: run(*x).square().sum(), (q, k, v), tuple(along))
    torch.testing.assert_close(by, slope)
    with forward_ad.dual_level():
        dual: Any = forward_ad
        duals = [dual.make_dual(x, y) for x, y in zip((q, k, v), along, strict=True)]
        found = dual.unpack_dual(run(*duals).square().sum())
        assert found.tangent is not None
        torch.testing.assert_close(found.tangent, slope)
        torch.testing.assert_close(found.primal, out)

    def one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return run(q[None], k[None], v[None]).square().sum()

    torch.testing.assert_close(func.vmap(one)(q, k, v).sum(), out)
    each = func.vmap(func.grad(one, (0, 1, 2)))(q, k, v)
    torch.testing.assert_close(each, expected)
    if backend == "reference":  # Row by row through a graph that was recorded before.
        ours = run(*leaves)
        every = torch.eye(4, ours.numel()).view(4, *ours.shape).to(ours)
        rows = torch.autograd.grad(ours, leaves, every, is_grads_batched=True)
        first = torch.autograd.grad(run(*leaves).flatten()[0], leaves)
        torch.testing.assert_close([row[0] for row in rows], [*first])


def test_a_kernel_by_name_says_that_torch_func_cannot_see_into_it() -> None:
    run, (q, k, v) = _run(RECIPES[0], "chunked")
    with pytest.raises(InputError, match=r"torch\.func"):
        func.vmap(lambda q, k, v: run(q[None], k[None], v[None]))(q, k, v)


BY_DIFFERENCES = [
    Recipe("KNA", "logn", train_length=4),
    Recipe("CosA", "", "interleaved", "YaRN"),
    Recipe("Baseline", "", method="ReRoPE", window=2),
    Recipe("QKNorm2020", "logn", method="ReRoPE", window=2),
    Recipe("QKRMSNorm", "", across="all"),
    Recipe("QKRMSNorm", gain=False),
    Recipe("KRMSNorm"),
    Recipe("QKLayerNorm", "", "none"),
    Recipe("QKInstanceNorm"),
]


@pytest.mark.parametrize("recipe", BY_DIFFERENCES, ids=[r.text for r in BY_DIFFERENCES])
def test_the_reference_to_the_second_order(recipe: Recipe) -> None:
    """Over 5 tokens, one padded, as a function of q, k, v and what is learned."""
    score = built(recipe, 2, 4, 1)
    padding = torch.tensor([[True, False, False, False, False]])

    def run(q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Tensor:
        return attention(q, k, v, score, not recipe.leaks, None, padding, backend="reference")

    inputs = [*tensors((1, 2, 5, 4), (1, 1, 5, 4), (1, 1, 5, 3)), *score.parameters()]
    assert gradcheck(run, inputs, fast_mode=True)
    assert gradgradcheck(run, inputs, fast_mode=True)
