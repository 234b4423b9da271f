"""Statistics over the queries: in cross attention the queries' padding is not the keys'."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from normattn import attention
from score import oracle
from score.cases import built, learned, tensors
from score.recipe import Recipe

B, H, T, D = 3, 2, 6, 4
KEYS = torch.arange(T)[None] < torch.tensor([[2], [0], [4]])
QUERIES = torch.arange(T)[None] >= torch.tensor([[6], [3], [5]])

RECIPES = [
    *(Recipe(variant, "", "none") for variant in ("QKBatchNorm", "QInstanceNorm", "KBatchNorm")),
    *(Recipe(variant, "logn", "half") for variant in ("QBatchNorm", "QKInstanceNorm")),
    Recipe("QKInstanceNorm", "", "interleaved", rotate_first=True),
    Recipe("QKBatchNorm", "logn", "half", rotate_first=True),
]


@pytest.mark.parametrize("own", [QUERIES, None], ids=["padded", "real"])
@pytest.mark.parametrize("recipe", RECIPES, ids=[recipe.text for recipe in RECIPES])
def test_cross_attention_of_equal_lengths(recipe: Recipe, own: Tensor | None) -> None:
    q, k, v = tensors((B, H, T, D), (B, H, T, D), (B, H, T, D))
    score = built(recipe, H, D)
    names = learned(score)
    expected = oracle.attend(
        *(recipe, q, k, v), causal=False, learned=names, padding=KEYS, query_padding=own
    )
    wanted = [q, k, v, *names.values()]
    by_hand = torch.autograd.grad(expected.sin().sum(), wanted)
    for backend in ("reference", "auto"):
        out = attention(
            *(q, k, v, score, False), key_padding=KEYS, query_padding=own, backend=backend
        )
        torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-10)
        for ours, hand in zip(torch.autograd.grad(out.sin().sum(), wanted), by_hand, strict=True):
            torch.testing.assert_close(ours, hand, rtol=1e-9, atol=1e-10)
