"""Keys that an extended layer keeps turned are those that it would turn anew, whatever happens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import normattn
from normattn.hf.attention_fn import ATTRIBUTE
from normattn.hf.rotated_key_cache import RotatedKeyCache

from .families import LENGTH, build, tokens

# Half typed by transformers: taken as Any.
_CACHE: Any = transformers.DynamicCache
METHODS: dict[str, dict[str, Any]] = {
    "LeakyReRoPE": {"window": 3, "s": 2.5},
    "SelfExtend": {"window": 3, "group": 2},
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


def _kept(model: Any) -> list[RotatedKeyCache]:
    layers = [module.__dict__.get(ATTRIBUTE) for module in model.modules()]
    kept = [layer.kept for layer in layers if layer is not None]
    assert kept
    return kept


def _step(model: Any, ids: Tensor, cache: Any) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(input_ids=ids, past_key_values=cache, use_cache=True).logits
    return out


def _whole(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(input_ids=ids, use_cache=False).logits
    return out


def _close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def _turns(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many keys are turned by each call that keeps them."""
    turned: list[int] = []
    own = RotatedKeyCache.rotated

    def counted(
        self: RotatedKeyCache, name: Any, k: Tensor, turn: Callable[[int], Tensor]
    ) -> Tensor:
        def noted(first: int) -> Tensor:
            turned.append(k.shape[2] - first)
            return turn(first)

        return own(self, name, k, noted)

    monkeypatch.setattr(RotatedKeyCache, "rotated", counted)
    return turned


def test_steps_are_the_whole_text(extended: Any) -> None:
    ids, cache = tokens(2, COUNT), _CACHE()
    steps = [_step(extended, ids[:, :5], cache)]
    steps += [_step(extended, ids[:, at : at + 1], cache) for at in range(5, COUNT - 4)]
    steps += [_step(extended, ids[:, COUNT - 4 :], cache)]
    # A moving spectrum reads a row as its own block does, at whatever length the text ends.
    _close(torch.cat(steps, 1), _whole(extended, ids))


def test_only_new_keys_are_turned(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids, cache = build("Llama").double(), tokens(1, COUNT), _CACHE()
    turned = _turns(monkeypatch)
    with normattn.extend(model, "LeakyReRoPE", window=3, s=2.5):
        # Extending reads a few tokens itself.
        turned.clear()
        _step(model, ids[:, :9], cache)
        assert turned == []
        for at in range(9, 12):
            _step(model, ids[:, at : at + 1], cache)
        layers = len(_kept(model))
        assert turned == [10] * layers + [1] * 2 * layers
        cache.crop(-1)
        _step(model, ids[:, 11:12], cache)
        assert turned[3 * layers :] == [1] * layers


def test_a_cache_that_was_changed_is_turned_anew(extended: Any) -> None:
    ids, cache = tokens(2, COUNT), _CACHE()
    for part in torch.split(ids[:, :12], [9, 1, 1, 1], 1):
        _step(extended, part, cache)
    other = tokens(2, COUNT).flip(0)
    # Rows exchanged by a beam search.
    cache.reorder_cache(torch.tensor([1, 0]))
    _close(_step(extended, other[:, 12:13], cache), _whole(extended, other[:, :13])[:, 12:])
    # Taken back, and another way gone.
    cache.crop(-3)
    changed = torch.cat((other[:, :10], ids[:, 10:14]), 1)
    for at in range(10, 14):
        out = _step(extended, changed[:, at : at + 1], cache)
    _close(out, _whole(extended, changed)[:, 13:])
    # Written to in place.
    fresh = _CACHE()
    _step(extended, ids[:, :13], fresh)
    _step(extended, ids[:, 13:14], fresh)
    for layer, source in zip(cache.layers, fresh.layers, strict=True):
        layer.keys.copy_(source.keys)
        layer.values.copy_(source.values)
    _close(_step(extended, ids[:, 14:15], cache), _whole(extended, ids[:, :15])[:, 14:])


def test_two_caches_in_turn(extended: Any) -> None:
    one, two = tokens(1, COUNT), tokens(1, COUNT).flip(1)
    caches = _CACHE(), _CACHE()
    for at in range(COUNT):
        for ids, cache in zip((one, two), caches, strict=True):
            out = _step(extended, ids[:, at : at + 1], cache)
    _close(out, _whole(extended, two)[:, -1:])


def test_nothing_outlives_the_cache() -> None:
    model, ids, cache = build("Llama").double(), tokens(1, COUNT), _CACHE()
    with normattn.extend(model, "LeakyReRoPE", window=3, s=2.5):
        for part in torch.split(ids, [COUNT - 2, 1, 1], 1):
            _step(model, part, cache)
        assert all(kept._rooms for kept in _kept(model))
        del cache
        assert not any(kept._rooms for kept in _kept(model))
