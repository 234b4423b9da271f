"""Statistics over the queries: in cross attention the queries' padding is not the keys'."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from normattn import Score, attention
from normattn.kernels import BACKENDS
from score import naive, oracle
from score.cases import array, built, learned, tensors
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
    real = {"padding": KEYS} | ({} if own is None else {"query_padding": own})
    values = {name: array(value) for name, value in names.items()}
    arrays: dict[str, Any] = {word: each.numpy() for word, each in real.items()}
    by_loop = oracle.attend(
        recipe, array(q), array(k), array(v), causal=False, learned=values, **arrays
    )
    by_formula = naive.attend(recipe, q, k, v, causal=False, learned=names, **real)
    torch.testing.assert_close(by_formula.detach(), torch.from_numpy(by_loop))
    wanted = [q, k, v, *names.values()]
    by_hand = torch.autograd.grad(by_formula.sin().sum(), wanted)
    for backend in ("reference", "auto"):
        assert backend in BACKENDS
        out = attention(
            *(q, k, v, score, False), key_padding=KEYS, query_padding=own, backend=backend
        )
        torch.testing.assert_close(out, by_formula, rtol=1e-9, atol=1e-10)
        for ours, hand in zip(torch.autograd.grad(out.sin().sum(), wanted), by_hand, strict=True):
            torch.testing.assert_close(ours, hand, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("text", ["QKBatchNorm", "QInstanceNorm"])
def test_padded_queries_change_no_statistic(text: str) -> None:
    q, k, v = tensors((B, H, T, D), (B, H, T, D), (B, H, T, D))
    hidden, results = QUERIES[:, None, :, None], []
    for fill in (0.0, 1e3):
        score = Score(text, H, D).double()
        queries = torch.where(hidden, fill, q)
        out = attention(queries, k, v, score, False, key_padding=KEYS, query_padding=QUERIES)
        buffers = [buffer.clone() for buffer in score.buffers()]
        results.append((out.masked_fill(hidden, 0.0), buffers))
    torch.testing.assert_close(results[0], results[1])
