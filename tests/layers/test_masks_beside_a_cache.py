"""`attn_mask` beside a cache: prefixes and spans that see both ways, keys that are hidden.

The oracle is `attention` over all tokens at once, with the mask of every pair.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from normattn import Attention, InputError, Score, attention
from normattn.layers.cache import KeyValueCache
from score.cases import tensors

TOKENS, D = 12, 8
PREFIX, SPAN, HIDDEN = slice(0, 4), slice(6, 9), 5
PIECES = [(0, 4, False), (4, 6, True), (6, 9, False), (9, 10, True), (10, 11, True), (11, 12, True)]
SCORES = ["Baseline", "KNA-logn@8", "CosA-logn@8", "Baseline-ALiBi", "QKRMSNorm-Sink", "KNA-NoPE"]


def _mask() -> Tensor:
    """True where a token sees another: causal, both ways in two spans, and never token 5."""
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    mask[PREFIX, PREFIX] = mask[SPAN, SPAN] = True
    mask[6:, HIDDEN] = False
    return mask


def _read(
    score: Score, qkv: list[Tensor], mask: Tensor, cache: KeyValueCache, padding: Tensor | None
) -> Tensor:
    outs = []
    for begin, end, causal in PIECES:
        q, k, v = (x[:, :, begin:end] for x in qkv)
        seen, padded = mask[..., begin:end, :end], None if padding is None else padding[:, :end]
        outs.append(attention(q, k, v, score, causal, seen, padded, cache=cache))
    return torch.cat(outs, 2)


@torch.no_grad()
@pytest.mark.parametrize("text", SCORES)
@pytest.mark.parametrize("kind", ["boolean", "floating", "padded"])
def test_pieces_are_the_whole(text: str, kind: str) -> None:
    score = Score(text, 4, D, 2).double().eval()
    q, k, v = tensors((2, 4, TOKENS, D), (2, 2, TOKENS, D), (2, 2, TOKENS, D))
    mask = _mask()
    padding = None
    if kind == "padded":
        padding = torch.arange(TOKENS) < torch.tensor([[0], [2]])
    if kind == "floating":
        mask = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -torch.inf)
    expected = attention(q, k, v, score, False, attn_mask=mask, key_padding=padding)
    for cache in (KeyValueCache(), KeyValueCache(TOKENS)):
        found = _read(score, [q, k, v], mask, cache, padding)
        for row, first in ((0, 0), (1, 2 if kind == "padded" else 0)):
            torch.testing.assert_close(
                found[row, :, first:], expected[row, :, first:], rtol=1e-9, atol=1e-9
            )


@torch.no_grad()
@pytest.mark.parametrize(
    "text", ["KNA-SlidingWindow(window=3)", "KNA-logn-SlidingWindow(window=3)@8"]
)
def test_a_layer_with_a_window_that_forgets(text: str) -> None:
    """n counts what the mask shows of all tokens, also of those that the cache has forgotten."""
    torch.manual_seed(0)
    layer = Attention(16, 2, score=text).double().eval()
    x = torch.randn(1, 40, 16, dtype=torch.float64)
    mask = torch.ones(40, 40, dtype=torch.bool)
    mask[:, 7], mask[:, 30] = False, False
    whole, cache = layer(x, attn_mask=mask), KeyValueCache(window=3)
    cuts = [0, 9, 20, *range(21, 41)]
    pieces = [
        layer(x[:, a:b], cache=cache, attn_mask=mask[a:b, :b]) for a, b in itertools.pairwise(cuts)
    ]
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_what_cannot_be_is_refused_before_the_cache_changes() -> None:
    q, k, v = tensors((1, 2, 3, D), (1, 2, 3, D), (1, 2, 3, D))
    every = torch.ones(3, 3, dtype=torch.bool)
    cases = [
        ("KNA", None, "needs attn_mask"),
        ("KNA", every[:2], "broadcast to"),
        ("KNA-ReRoPE(window=2)@8", every, "causal attention only"),
        ("QKBatchNorm", every, "statistics across the sequence"),
    ]
    for text, mask, said in cases:
        score, cache = Score(text, 2, D).double().eval(), KeyValueCache()
        with pytest.raises(InputError, match=said):
            attention(q, k, v, score, cache=cache, attn_mask=mask, causal=False)
        assert cache.length == 0
    layer = Attention(16, 2).eval()
    with pytest.raises(InputError, match="attn_mask"):
        layer(torch.zeros(1, 3, 16), causal=False, cache=KeyValueCache())
