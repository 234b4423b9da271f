"""`attention` in every shape: grouped heads, lengths, padding, masks, positions, precisions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from normattn import InputError, Score, attention
from normattn.kernels import tiled
from score import oracle
from score.cases import built, learned, tensors
from score.oracle import Recipe

PLAIN = Recipe("KNA", "logn", train_length=4)
RECIPES = [
    PLAIN,
    Recipe("Baseline", "", method="ReRoPE", window=3),
    Recipe("CosA", "logn", "none", train_length=4),
    Recipe("QNA", "logn+", "interleaved", "YaRN", train_length=4),
]
IDS = [recipe.text for recipe in RECIPES]
every_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=IDS)


TILES = {"chunked": (256, 2**20), "chunked in small tiles": (3, 1500)}
"""Tiles of everything, and of 3 rows of some heads or batch rows."""
BACKENDS = ("reference", "auto", *TILES)


def _assert_agree(
    recipe: Recipe, q: Tensor, k: Tensor, v: Tensor, backends: Any = BACKENDS, **options: Any
) -> None:
    """All backends give the oracle's output and gradients."""
    names = {"attn_mask": "mask", "key_padding": "padding"}
    words = {names.get(word, word): value for word, value in options.items()}
    score = built(recipe, q.shape[1], q.shape[3], k.shape[1])
    parameters = learned(score)
    leaves = (q, k, v, *parameters.values())
    expected = oracle.attend(recipe, q, k, v, learned=parameters, **words)
    by_hand = torch.autograd.grad(expected.sin().sum(), leaves)
    for backend in backends:
        rows, size = TILES.get(backend, TILES["chunked"])
        with mock.patch.multiple(tiled, ROWS=rows, TILE_BYTES=size):
            out = attention(q, k, v, score, backend=backend.partition(" ")[0], **options)
            torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-10)
            ours = torch.autograd.grad(out.sin().sum(), leaves)
            torch.testing.assert_close(ours, by_hand, rtol=1e-9, atol=1e-10)


@every_recipe
@pytest.mark.parametrize(
    ("heads", "groups", "queries", "keys"),
    [(4, 1, 7, 7), (4, 2, 3, 8), (3, 3, 7, 8), (2, 2, 1, 1), (2, 1, 1, 8), (2, 2, 2, 3)],
)
def test_grouped_heads_and_fewer_queries_than_keys(
    recipe: Recipe, heads: int, groups: int, queries: int, keys: int
) -> None:
    """Queries are the last ones; values have another size."""
    q, k, v = tensors((2, heads, queries, 4), (2, groups, keys, 4), (2, groups, keys, 6))
    _assert_agree(recipe, q, k, v)


@pytest.mark.parametrize("recipe", [r for r in RECIPES if r.method != "ReRoPE"])
@pytest.mark.parametrize(("queries", "keys"), [(1, 5), (5, 1), (7, 4), (4, 7)])
def test_bidirectional_over_any_lengths(recipe: Recipe, queries: int, keys: int) -> None:
    q, k, v = tensors((2, 2, queries, 4), (2, 2, keys, 4), (2, 2, keys, 4))
    _assert_agree(recipe, q, k, v, (*BACKENDS, "fused"), causal=False)


@every_recipe
def test_padding_anywhere(recipe: Recipe) -> None:
    q, k, v = tensors((3, 2, 7, 4), (3, 1, 7, 4), (3, 1, 7, 4))
    padding = torch.zeros(3, 7, dtype=torch.bool)
    padding[0, :3], padding[1, 5:], padding[2, ::2] = True, True, True
    _assert_agree(recipe, q, k, v, key_padding=padding)
    if recipe.method != "ReRoPE":
        _assert_agree(recipe, q, k, v, key_padding=padding, causal=False)


STATISTICS = [
    *(Recipe(variant, "", "none") for variant in ("QKBatchNorm", "QInstanceNorm", "KBatchNorm")),
    *(Recipe(variant, "logn", "half") for variant in ("QBatchNorm", "QKInstanceNorm")),
    Recipe("QKInstanceNorm", "", "interleaved", rotate_first=True),
    Recipe("QKBatchNorm", "logn", "half", rotate_first=True),
]


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("recipe", STATISTICS, ids=[recipe.text for recipe in STATISTICS])
def test_statistics_leave_out_the_padding_of_queries_and_of_keys(
    recipe: Recipe, padded: bool
) -> None:
    """As in cross attention, where the two differ."""
    q, k, v = tensors(*[(3, 2, 6, 4)] * 3)
    at = torch.arange(6)[None]
    keys, queries = at < torch.tensor([[2], [0], [4]]), at >= torch.tensor([[6], [3], [5]])
    options = {"key_padding": keys, "query_padding": queries if padded else None}
    _assert_agree(recipe, q, k, v, ("reference", "auto"), causal=False, **options)


def _masks() -> Iterator[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    seen = torch.rand(2, 2, 7, 7, generator=generator) > 0.4
    bias = torch.randn(2, 2, 7, 7, generator=generator, dtype=torch.float64) * 3
    yield "boolean", seen
    yield "boolean, shared by heads", seen[:, :1]
    yield "added", bias
    yield "added, of queries only", bias[..., :1]
    yield "added, hiding some", bias.masked_fill(~seen, -torch.inf)
    yield "added, hiding every key of a row", bias.index_fill(2, torch.tensor([2, 5]), -torch.inf)


@every_recipe
@pytest.mark.parametrize(("name", "mask"), list(_masks()), ids=[name for name, _ in _masks()])
def test_masks(recipe: Recipe, name: str, mask: Tensor) -> None:
    q, k, v = tensors((2, 2, 7, 4), (2, 2, 7, 4), (2, 2, 7, 4))
    _assert_agree(recipe, q, k, v, attn_mask=mask)
    padding = torch.arange(7)[None] < torch.tensor([[1], [3]])
    _assert_agree(recipe, q, k, v, attn_mask=mask, key_padding=padding)


@every_recipe
def test_explicit_positions(recipe: Recipe) -> None:
    q, k, v = tensors((2, 2, 5, 4), (2, 2, 6, 4), (2, 2, 6, 4))
    rows = torch.tensor([[0, 1, 5, 9, 30], [3, 2, 1, 0, 4]])
    columns = torch.tensor([5, 0, 1, 2, 9, 3])
    padding = torch.arange(6)[None] < torch.tensor([[2], [0]])
    given: list[dict[str, Tensor]] = [
        {"q_positions": rows, "k_positions": columns},
        {"q_positions": rows[0], "k_positions": columns},
        {"q_positions": rows},
        {"k_positions": torch.stack((columns, columns.flip(0)))},
        {"q_positions": rows, "k_positions": columns, "key_padding": padding},
    ]
    for options in given:
        _assert_agree(recipe, q, k, v, **options)


@every_recipe
@pytest.mark.parametrize(
    ("dtype", "tolerance", "by_gradient"),
    [(torch.float32, 3e-6, 3e-5), (torch.bfloat16, 0.02, 0.06)],
    ids=["float32", "bfloat16"],
)
def test_precision(
    recipe: Recipe, dtype: torch.dtype, tolerance: float, by_gradient: float
) -> None:
    shapes = (1, 2, 40, 16), (1, 1, 40, 16), (1, 1, 40, 16)
    low = tensors(*shapes, dtype=dtype)
    wide = [x.detach().double().requires_grad_() for x in low]
    exact = attention(wide[0], wide[1], wide[2], recipe.text, backend="reference")
    exact_grads = torch.autograd.grad(exact.sin().sum(), wide)
    for backend in ("auto", "chunked", "reference"):
        out = attention(low[0], low[1], low[2], recipe.text, backend=backend)
        assert out.dtype == dtype
        assert (out.double() - exact).norm() <= tolerance * exact.norm()
        grads = torch.autograd.grad(out.double().sin().sum(), low)
        for mine, hand in zip(grads, exact_grads, strict=True):
            assert mine.dtype == dtype
            assert (mine.double() - hand).norm() <= by_gradient * hand.norm(), backend


def test_a_mask_that_learns_gets_its_gradient() -> None:
    q, k, v = tensors((1, 2, 5, 4), (1, 2, 5, 4), (1, 2, 5, 4))
    (mask,) = tensors((2, 5, 5), seed=5)
    out = attention(q, k, v, PLAIN.text, attn_mask=mask)
    (ours,) = torch.autograd.grad(out.square().sum(), mask)
    (hand,) = torch.autograd.grad(oracle.attend(PLAIN, q, k, v, mask=mask).square().sum(), mask)
    torch.testing.assert_close(ours, hand)
    with pytest.raises(InputError, match="learned mask"):
        attention(q, k, v, PLAIN.text, attn_mask=mask, backend="chunked")


COUNTING = (
    *("Baseline-logn@4", "CosA-NoPE-logn@4", "Baseline-SSMax(bias=true)@4", "Baseline-SqrtLogN@4"),
    *("Baseline-Temperature(beta=0.7,length=2,shift=1)@4", "QKRMSNorm-logn-RotateFirst@4"),
    "Baseline-YaRN(factor=2)-logn+@2",
)


@pytest.mark.parametrize("name", COUNTING)
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_keys_that_a_mask_hides_do_not_count(name: str, backend: str) -> None:
    """Causality and padding mean the same as a mask and as arguments."""
    score = Score(name, 2, 4).double()
    q, k, v = tensors((2, 2, 7, 4), (2, 2, 7, 4), (2, 2, 7, 4))
    triangle = torch.ones(7, 7, dtype=torch.bool).tril()
    causal = attention(q, k, v, score, backend=backend)
    added = torch.zeros(7, 7, dtype=torch.float64).masked_fill(~triangle, -torch.inf)
    lowest = added.clamp(min=torch.finfo(torch.float32).min).float()
    for mask in (triangle, triangle.expand(2, 2, 7, 7), added, lowest):
        as_mask = attention(q, k, v, score, causal=False, attn_mask=mask, backend=backend)
        torch.testing.assert_close(as_mask, causal, rtol=1e-9, atol=1e-11)
    padding = torch.arange(7)[None] < torch.tensor([[0], [3]])
    by_key = (~padding)[:, None, None]
    for way in (True, False):
        padded = attention(q, k, v, score, causal=way, key_padding=padding, backend=backend)
        as_mask = attention(q, k, v, score, causal=way, attn_mask=by_key, backend=backend)
        real = ~padding[:, None, :, None]
        torch.testing.assert_close(as_mask * real, padded * real, rtol=1e-9, atol=1e-11)
        plain = attention(q, k, v, score, causal=way, backend=backend)
        everything = torch.ones(2, 1, 7, 7, dtype=torch.bool)
        as_mask = attention(q, k, v, score, causal=way, attn_mask=everything, backend=backend)
        torch.testing.assert_close(as_mask, plain, rtol=1e-9, atol=1e-11)
