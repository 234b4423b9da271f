"""Decoding keeps rotated keys beside the cache: whatever happens to it, logits are those of a read.

One test counts how many keys are rotated, which is why they are kept.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import normattn
from normattn.hf.attention_fn import RotatedKeyCache

from .families import LENGTH, build, logits, tokens

# Half typed by transformers: taken as Any.
_CACHE: Any = transformers.DynamicCache
METHODS: dict[str, dict[str, Any]] = {
    "LeakyReRoPE": {"window": 3, "s": 2.5},
    "DynamicNTK": {},
    "ReRoPE-logn+": {"window": 3},
}
COUNT = 2 * LENGTH + 3


@pytest.fixture(params=METHODS)
def extended(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A model in float64, extended."""
    model = build("Llama").double()
    with normattn.extend(model, request.param, **METHODS[request.param]):
        yield model


def _step(model: Any, ids: Tensor, cache: Any) -> Tensor:
    return logits(model, ids, past_key_values=cache, use_cache=True)


def _assert_read(found: Tensor, model: Any, ids: Tensor) -> None:
    """The last rows are those of one forward without a cache."""
    whole = logits(model, ids, use_cache=False)[:, -found.shape[1] :]
    torch.testing.assert_close(found, whole, rtol=1e-9, atol=1e-9)


def test_only_new_keys_are_rotated(monkeypatch: pytest.MonkeyPatch) -> None:
    rotated: list[int] = []
    own = RotatedKeyCache.rotated

    def counted(
        self: RotatedKeyCache, name: Any, k: Tensor, rotate: Callable[[int], Tensor]
    ) -> Tensor:
        def noted(first: int) -> Tensor:
            rotated.append(k.shape[2] - first)
            return rotate(first)

        return own(self, name, k, noted)

    monkeypatch.setattr(RotatedKeyCache, "rotated", counted)
    model, ids, cache = build("Llama").double(), tokens(1, COUNT), _CACHE()
    with normattn.extend(model, "LeakyReRoPE", window=3, s=2.5) as extension:
        rotated.clear()
        _step(model, ids[:, :9], cache)
        assert rotated == []
        for at in range(9, 12):
            _step(model, ids[:, at : at + 1], cache)
        layers = len(extension.resolved.extended)
        assert rotated == [10] * layers + [1] * 2 * layers
        cache.crop(-1)
        _step(model, ids[:, 11:12], cache)
        assert rotated[3 * layers :] == [1] * layers


def test_a_cache_that_was_changed_is_rotated_again(extended: Any) -> None:
    ids, cache = tokens(2, COUNT), _CACHE()
    for part in torch.split(ids[:, :12], [9, 1, 1, 1], 1):
        _step(extended, part, cache)
    other = tokens(2, COUNT).flip(0)
    cache.reorder_cache(torch.tensor([1, 0]))  # as a beam search does
    _assert_read(_step(extended, other[:, 12:13], cache), extended, other[:, :13])
    cache.crop(-3)  # taken back, and another way gone
    changed = torch.cat((other[:, :10], ids[:, 10:14]), 1)
    for at in range(10, 14):
        out = _step(extended, changed[:, at : at + 1], cache)
    _assert_read(out, extended, changed)
    fresh = _CACHE()
    for part in torch.split(ids[:, :14], [13, 1], 1):
        _step(extended, part, fresh)
    for layer, source in zip(cache.layers, fresh.layers, strict=True):
        layer.keys.copy_(source.keys)  # written to in place
        layer.values.copy_(source.values)
    _assert_read(_step(extended, ids[:, 14:15], cache), extended, ids[:, :15])


def test_threads_decode_side_by_side(extended: Any) -> None:
    texts = [tokens(1, COUNT, seed) for seed in range(3)]

    def decode(ids: Tensor) -> Tensor:
        cache = _CACHE()
        parts = torch.split(ids, [COUNT - 8, *[1] * 4, 4], 1)
        return torch.cat([_step(extended, part, cache) for part in parts], 1)

    with ThreadPoolExecutor(len(texts)) as pool:
        for out, ids in zip(pool.map(decode, texts), texts, strict=True):
            _assert_read(out, extended, ids)


def test_two_caches_in_turn(extended: Any) -> None:
    texts = tokens(1, COUNT), tokens(1, COUNT).flip(1)
    caches = _CACHE(), _CACHE()
    cuts = (0, *range(COUNT - 5, COUNT + 1))
    for a, b in pairwise(cuts):
        found = [
            _step(extended, ids[:, a:b], cache) for ids, cache in zip(texts, caches, strict=True)
        ]
    copied = copy.deepcopy(caches[0])  # a prompt that several texts share
    for cache, token in ((caches[0], texts[0][:, :1]), (copied, texts[1][:, :1])):
        found.append(_step(extended, token, cache))
    for out, ids in zip(
        found, (*texts, *(torch.cat((texts[0], other[:, :1]), 1) for other in texts)), strict=True
    ):
        _assert_read(out, extended, ids)
