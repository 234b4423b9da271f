"""The model's cache: beams, going back, a fixed size, bounded memory, and what it refuses."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from kernels.memory import largest
from normattn.errors import InputError
from normattn.kernels.tiled import TILE_BYTES
from normattn.models.cache import ModelCache
from normattn.models.causal_lm import CausalLM
from normattn.models.config import CausalLMConfig

VOCABULARY, L = 11, 5


def _model(score: str = "KNA-logn", dtype: torch.dtype = torch.float64, **changes: Any) -> CausalLM:
    torch.manual_seed(0)
    settings = {"dim": 8, "layers": 2, "heads": 2, "train_length": L, "score": score, **changes}
    return CausalLM(CausalLMConfig(vocab_size=VOCABULARY, **settings)).to(dtype).eval()


def _nbytes(cache: ModelCache) -> int:
    """The allocated bytes of keys and values, used or not."""
    rooms = [room for layer in cache.layers for room in (layer._keys, layer._values)]
    return sum(room.data.untyped_storage().nbytes() for room in rooms if room.data is not None)


def _ids(rows: int, length: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (rows, length), generator=generator)


SCORES = ("KNA-logn", "KNA-Packed", "Baseline-SlidingWindow(window=3)", "QNA-ALiBi")
MODELS = {text: _model(text) for text in SCORES}


def assert_close(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-10)


@torch.no_grad()
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_beams_go_on_from_any_row(name: str, padded: bool) -> None:
    model, ids, more = MODELS[name], _ids(3, 9), _ids(4, 7, seed=1)
    padding = torch.zeros(3, 9, dtype=torch.bool)
    if padded:
        padding[1, :4] = True
    _, cache = model.prefill(ids, padding, chunk=4)
    beams = [1, 1, 0, 2]
    cache.reorder(beams)
    read = torch.cat([model(part, cache=cache) for part in torch.split(more, [1, 2, 1, 3], 1)], 1)
    for row, beam in enumerate(beams):
        start = 4 if padded and beam == 1 else 0
        whole = torch.cat((ids[beam : beam + 1, start:], more[row : row + 1]), 1)
        assert_close(read[row : row + 1], model(whole)[:, -7:])


@torch.no_grad()
@pytest.mark.parametrize("method", ["", "DynamicNTK", "StreamingLLM(window=4)"])
def test_going_back_forgets(method: str) -> None:
    model, ids, other = MODELS["KNA-Packed"], _ids(2, 9), _ids(2, 8, seed=1)
    with model.using(method):
        _, cache = model.prefill(ids)
        for part in torch.split(other, 1, 1):
            model(part, cache=cache)
        cache.truncate(6)
        # As long as before, by other tokens, when the next ones come one by one again.
        sizes = [11, 1, 1, 1]
        more = torch.cat((other, ids[:, :6]), 1)
        read = torch.cat([model(part, cache=cache) for part in torch.split(more, sizes, 1)], 1)
        assert_close(read, model(torch.cat((ids[:, :6], more), 1))[:, 6:])
        cache.truncate(0)
        assert_close(model(ids, cache=cache), model(ids))
    with pytest.raises(InputError, match="cannot be cut to 99"):
        cache.truncate(99)


@torch.no_grad()
def test_a_window_bounds_the_memory_and_how_far_one_can_go_back() -> None:
    model, ids = MODELS["Baseline-SlidingWindow(window=3)"], _ids(1, 90)
    cache = model.new_cache()
    read = torch.cat([model(part, cache=cache) for part in torch.split(ids, 1, 1)], 1)
    assert_close(read, model(ids))
    per_token = 2 * 2 * 8 * 8  # two layers, keys and values, width 8, float64
    assert _nbytes(cache) <= 64 * per_token
    cache.truncate(89)
    assert_close(model(ids[:, 89:], cache=cache), read[:, 89:])
    with pytest.raises(InputError, match="has forgotten the keys before token"):
        cache.truncate(30)
    assert cache.length == 90


WINDOWED = (
    "Baseline-SlidingWindow(window=3)",
    "QKRMSNorm-DynamicNTK-logn-FullEvery(every=2,window=3,stretched=true)",
    "CosA-HWFA",
    "KNA-SlidingWindow(window=3)-FoX",
    "Baseline-SlidingWindow(window=3)-Packed",
    # Layers that mix their values hold the same tokens, all.
    "Baseline-ValueResidual-FullEvery(window=3)",
)


@torch.no_grad()
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", WINDOWED)
def test_what_a_window_forgets_is_missed_by_no_row(
    name: str, padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Rooms so small that they are emptied several times, past several multiples of L.
    monkeypatch.setattr("normattn.layers.cache._SMALLEST", 2)
    model, sizes = _model(name), [6, 1, 1, 1, 3, 1, 1, 1, 5, *[1] * 12]
    ids, padding = _ids(2, sum(sizes)), torch.zeros(2, sum(sizes), dtype=torch.bool)
    padding[1, : 4 * padded] = True
    cache = model.new_cache()
    parts = zip(torch.split(ids, sizes, 1), torch.split(padding, sizes, 1), strict=True)
    read = torch.cat([model(part, pad, cache) for part, pad in parts], 1)
    assert any(layer.dropped > L for layer in cache.layers) or "FullEvery(window=3)" in name
    for row, count in enumerate(padding.sum(1).tolist()):
        assert_close(read[row : row + 1, count:], model(ids[row : row + 1, count:]))


@torch.no_grad()
def test_a_static_cache_takes_its_room_at_once_and_never_more() -> None:
    model, ids = MODELS["KNA-logn"], _ids(2, 12)
    cache = model.new_cache(max_length=12)
    model(ids[:, :3], cache=cache)
    taken = _nbytes(cache)
    model(ids[:, 3:11], cache=cache)
    with pytest.raises(InputError, match="room for 12 tokens, and 11 of it are taken: 2 more"):
        model(ids[:, 10:], cache=cache)
    last = model(ids[:, 11:], cache=cache)[:, -1]
    assert_close(last, model(ids)[:, -1])
    assert _nbytes(cache) == taken == 2 * 2 * 2 * (12 + 1) * 8 * 8  # one place is never used
    with pytest.raises(InputError, match="at least 1"):
        model.new_cache(max_length=0)


@torch.no_grad()
def test_a_call_that_failed_changes_nothing() -> None:
    model, ids = MODELS["KNA-Packed"], _ids(1, 9)
    _, cache = model.prefill(ids[:, :5])
    with pytest.raises(InputError, match="vocabulary"):
        model(torch.tensor([[1, 99]]), cache=cache)
    handle = model.blocks[1].register_forward_pre_hook(Mock(side_effect=RuntimeError("half-way")))
    with pytest.raises(RuntimeError, match="half-way"):
        model(ids[:, 6:], cache=cache)
    handle.remove()
    assert_close(model(ids[:, 5:], cache=cache), model(ids)[:, 5:])


@torch.no_grad()
def test_what_a_cache_refuses() -> None:
    model, ids = MODELS["KNA-logn"], _ids(2, 6)
    _, cache = model.prefill(ids)
    with model.using("YaRN", factor=2), pytest.raises(InputError, match="new cache after switch"):
        model(ids, cache=cache)
    with pytest.raises(InputError, match="holds keys of 2 rows"):
        model(ids[:1], cache=cache)
    padding = torch.zeros(2, 6, dtype=torch.bool)
    padding[1, 0] = True
    with pytest.raises(InputError, match="pad on the left"):
        model(ids, padding, cache)
    with pytest.raises(InputError, match="pad on the left"):
        model(ids, padding.flip(1), model.new_cache())
    with pytest.raises(InputError, match="at least one"):
        model.prefill(ids[:, :0])
    with torch.enable_grad(), pytest.raises(InputError, match="no gradients"):
        model(ids, cache=model.new_cache())


@torch.no_grad()
@pytest.mark.parametrize("method", ["", "ReRoPE"])
def test_64_lengths_take_bounded_memory(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model("KNA", torch.float32, layers=1, train_length=16)
    ids = _ids(1, 64 * 16 + 1)
    with model.using(method):
        whole = model.token_scores(ids)
        monkeypatch.setattr("normattn.models.causal_lm._SCORED_TOKENS", 256)
        monkeypatch.setattr("normattn.models.causal_lm.CHUNK", 64)
        with largest() as memory:
            read = model.token_scores(ids)
    # In float32, summed in other orders.
    torch.testing.assert_close(read.loss, whole.loss, rtol=0, atol=2e-5)
    assert (read.correct == whole.correct).float().mean() > 0.999
    # A tile of scores is the largest: an eighth of what the length squared would be.
    assert memory.numel <= TILE_BYTES // 4 == 2 * (64 * 16) ** 2 // 8
