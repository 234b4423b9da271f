"""Selective attention: limits, what is handed on, caches that are cut, turned and left behind."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from normattn import InputError, Score, attention
from normattn.kernels import reference
from normattn.layers.cache import KeyValueCache
from score.cases import tensors

B, H, T, D = 2, 2, 11, 8
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
    caches = {
        "growing": KeyValueCache(),
        "static": KeyValueCache(70),
        "window": KeyValueCache(window=3),
    }
    cache, whole = caches[kind], attention(q, k, v, score)
    order, first = torch.tensor([1, 0]), 0
    for size in (2, 5, 1, 60, 1, 1):
        new = slice(first, first + size)
        out = attention(q[:, :, new], k[:, :, new], v[:, :, new], score, cache=cache)
        torch.testing.assert_close(out, whole[:, :, new])
        cache.reorder(order)
        q, k, v, whole = q[order], k[order], v[order], whole[order]
        first += size
    assert (cache.dropped > 0) == (kind == "window")
