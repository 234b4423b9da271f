"""Derivatives by finite differences: reference to the second order, chunked to the first."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from normattn import attention
from score.cases import built, learned, tensors
from score.oracle import Recipe

RECIPES = [
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
every_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=[r.text for r in RECIPES])
Function = Callable[..., Tensor]


def _problem(recipe: Recipe, backend: str) -> tuple[Function, list[Tensor]]:
    """Attention over 5 tokens, one padded, as a function of q, k, v and what is learned."""
    score = built(recipe, 2, 4, 1)
    padding = torch.tensor([[True, False, False, False, False]])

    def run(q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Tensor:
        causal = not recipe.leaks
        return attention(q, k, v, score, causal, key_padding=padding, backend=backend)

    q, k, v = tensors((1, 2, 5, 4), (1, 1, 5, 4), (1, 1, 5, 3))
    return run, [q, k, v, *learned(score).values()]


@every_recipe
def test_the_reference_to_the_second_order(recipe: Recipe) -> None:
    assert gradcheck(*_problem(recipe, "reference"), fast_mode=True)
    assert gradgradcheck(*_problem(recipe, "reference"), fast_mode=True)


def test_a_retained_graph_gives_the_same_gradient_twice() -> None:
    recipe = RECIPES[2]
    run, inputs = _problem(recipe, "chunked")
    out = run(*inputs).square().sum()
    first = torch.autograd.grad(out, inputs, retain_graph=True)
    second = torch.autograd.grad(out, inputs)
    for one, two in zip(first, second, strict=True):
        assert torch.equal(one, two)
