"""Masks and selective attention beside a cache, against attention over all tokens at once."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from normattn import Attention, InputError, Score, attention
from normattn.kernels import reference
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
    padding = torch.arange(TOKENS) < torch.tensor([[0], [2]]) if kind == "padded" else None
    if kind == "floating":
        mask = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -torch.inf)
    expected = attention(q, k, v, score, False, attn_mask=mask, key_padding=padding)
    for cache in (KeyValueCache(), KeyValueCache(TOKENS)):
        found = _read(score, [q, k, v], mask, cache, padding)
        real = 1 if padding is None else ~padding[:, None, :, None]
        torch.testing.assert_close(found * real, expected * real, rtol=1e-9, atol=1e-9)


@torch.no_grad()
@pytest.mark.parametrize("logn", ["", "logn-"])
def test_a_layer_with_a_window_that_forgets(logn: str) -> None:
    """n counts what the mask shows of all tokens, also of those that the cache has forgotten."""
    torch.manual_seed(0)
    layer = Attention(16, 2, score=f"KNA-{logn}SlidingWindow(window=3)@8").double().eval()
    x = torch.randn(1, 40, 16, dtype=torch.float64)
    mask = torch.ones(40, 40, dtype=torch.bool)
    mask[:, 7], mask[:, 30] = False, False
    whole, cache = layer(x, attn_mask=mask), KeyValueCache(window=3)
    cuts = itertools.pairwise([0, 9, 20, *range(21, 41)])
    pieces = [layer(x[:, a:b], cache=cache, attn_mask=mask[a:b, :b]) for a, b in cuts]
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


B, H, T = 2, 2, 11
SHAPES = (B, H, T, D), (B, 1, T, D), (B, 1, T, D)
NAME = "Baseline-NoPE-Selective"


def test_strips_hand_on_what_was_taken_with_its_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = tensors((1, H, 70, D), (1, 1, 70, D), (1, 1, 70, D))
    found = []
    for size in (2**22, 2**12):
        monkeypatch.setattr(reference, "STRIP_BYTES", size)
        out = attention(q, k, v, "KNA-Selective", backend="strips")
        found.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    torch.testing.assert_close(*found)


def _step(score: Score, cache: KeyValueCache, q: Tensor, k: Tensor, new: slice) -> Tensor:
    return attention(q[:, :, new], k[:, :, new], k[:, :, new], score, cache=cache)


@torch.no_grad()
def test_a_cache_takes_back_its_last_call_and_no_more() -> None:
    q, k, _ = (x.detach() for x in tensors(*SHAPES))
    score, cache = Score(NAME, H, D, 1).double(), KeyValueCache()
    whole = attention(q, k, k, score)
    _step(score, cache, q, k, slice(0, 4))
    _step(score, cache, 3 * q, -k, slice(4, 5))
    cache.truncate(4)
    again = _step(score, cache, q, k, slice(4, 9))
    torch.testing.assert_close(again, whole[:, :, 4:9])
    with pytest.raises(InputError, match="after token 3 have selected"):
        cache.truncate(3)
    assert not cache.croppable
    with pytest.raises(InputError, match="unknown backend"):
        attention(q[:, :, 9:], k[:, :, 9:], k[:, :, 9:], score, cache=cache, backend="none")
    with pytest.raises(InputError, match="lacks what its first 11 tokens have selected"):
        _step(score, cache, q, k, slice(9, 11))
    cache.truncate(0)
    torch.testing.assert_close(_step(score, cache, q, k, slice(0, T)), whole)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["growing", "static", "window"])
def test_rows_of_a_cache_are_exchanged_and_old_keys_dropped(kind: str) -> None:
    q, k, v = (x.detach() for x in tensors((B, H, 70, D), (B, 1, 70, D), (B, 1, 70, D)))
    score = Score(f"{NAME}-SlidingWindow(window=3)", H, D, 1).double()
    caches = {"static": KeyValueCache(70), "window": KeyValueCache(window=3)}
    cache, whole = caches.get(kind, KeyValueCache()), attention(q, k, v, score)
    order, first = torch.tensor([1, 0]), 0
    for size in (2, 5, 1, 60, 1, 1):
        new = slice(first, first + size)
        out = attention(q[:, :, new], k[:, :, new], v[:, :, new], score, cache=cache)
        torch.testing.assert_close(out, whole[:, :, new])
        cache.reorder(order)
        q, k, v, whole = q[order], k[order], v[order], whole[order]
        first += size
    assert (cache.dropped > 0) == (kind == "window")
