"""Caches, ragged batches, beams, half precision: decoding is a read, whatever happens to the cache.

What a method does to a family, its undoing and transformers' own cache: `matrix.row`.
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
from transformers import StaticCache

import normattn
from normattn.hf import token_scorer
from normattn.hf.attention_fn import RotatedKeyCache
from thorough import half_of

from .families import LENGTH, build, logits, model_of, tokens
from .matrix import stepwise

CLOSE: dict[str, Any] = {"rtol": 0, "atol": 1e-4}
COUNT = 2 * LENGTH + 3
# Half typed by transformers: taken as Any.
_CACHE: Any = transformers.DynamicCache
# One for each way in: attention of our own with keys unrotated, rotated, and by blocks of rows.
METHODS = ("ReRoPE(window=3)-logn+", "YaRN(factor=4)-logn+", "DynamicNTK", "DualChunk")
# Plain, windows with a cap, two bases, layers without positions, interleaved, a part, a sink.
FAMILIES = ("Llama", "Gemma2", "Gemma3Text", "SmolLM3", "Cohere", "Glm4", "GptOss")
STEPS = (5, 7, *[1] * (COUNT - 12))


@pytest.mark.parametrize(("family", "method"), half_of(FAMILIES, METHODS))
def test_a_static_cache_agrees_with_one_forward(family: str, method: str) -> None:
    model, ids = model_of(family), tokens(1, COUNT)
    with normattn.extend(model, method):
        fixed = StaticCache(config=model.config, max_cache_len=COUNT + 3)
        found = stepwise(model, ids, STEPS, fixed)
        torch.testing.assert_close(found, logits(model, ids), **CLOSE)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_ragged_batch_reads_each_row_alone(family: str) -> None:
    model, ids, starts = model_of(family), tokens(3, COUNT), torch.tensor([0, 5, 11])
    mask = (torch.arange(COUNT) >= starts[:, None]).long()
    ids = ids * mask
    for method in METHODS[:2]:
        with normattn.extend(model, method):
            whole = logits(model, ids, attention_mask=mask)
            cached = stepwise(model, ids, STEPS, attention_mask=mask)
            for row, start in enumerate(starts):
                alone = logits(model, ids[row : row + 1, start:])[0]
                torch.testing.assert_close(whole[row, start:], alone, **CLOSE)
                torch.testing.assert_close(cached[row, start:], alone, **CLOSE)


@pytest.mark.parametrize("family", ["Llama", "Gemma3Text"])
def test_beam_search_and_ragged_prompts(family: str) -> None:
    model, ids = model_of(family), tokens(2, 14)
    asked: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "num_beams": 2}
    ids[1, :4] = 0
    mask = (ids != 0).long()
    with normattn.extend(model, "ReRoPE-logn+", window=3):
        together = model.generate(ids, attention_mask=mask, **asked)
        fixed = model.generate(ids, attention_mask=mask, cache_implementation="static", **asked)
        alone = model.generate(ids[1:, 4:], attention_mask=mask[1:, 4:], **asked)
    assert torch.equal(together, fixed)
    assert torch.equal(together[1, 4:], alone[0])


@pytest.mark.parametrize("method", ["logn+", "ReRoPE", "YaRN", "ReRoPE beyond its window"])
def test_half_precision_keeps_large_scores(method: str) -> None:
    """Scores of deviation 20, as trained models have, are not rounded before softmax."""
    exact, ids = build("Llama"), tokens(2, 200 if method.endswith("window") else 40)
    for name, weight in exact.named_parameters():
        if "q_proj" in name or "k_proj" in name:
            weight.data *= 30
    rough = copy.deepcopy(exact).bfloat16()
    values: dict[str, Any] = {"train_length": 64}
    values |= {"YaRN": {"factor": 1}, "logn+": {}}.get(method, {"window": 40})
    as_trained = (logits(rough, ids).float() - logits(exact, ids)).abs().mean()
    name = method.partition(" ")[0]
    with normattn.extend(rough, name, **values), normattn.extend(exact, name, **values):
        found = logits(rough, ids)
        assert found.dtype == torch.bfloat16
        assert (found.float() - logits(exact, ids)).abs().mean() < 1.2 * as_trained


@pytest.mark.parametrize("family", ["Llama", "Gemma2", "Granite", "Cohere"])
def test_tokens_are_scored_as_by_the_logits(family: str) -> None:
    model, ids = model_of(family), tokens()
    score = token_scorer(model)

    def assert_scored() -> None:
        whole, found = logits(model, ids[:, :-1]), score(ids)
        wanted = torch.nn.functional.cross_entropy(whole.mT, ids[:, 1:], reduction="none")
        torch.testing.assert_close(found.loss, wanted, rtol=1e-5, atol=1e-5)
        assert torch.equal(found.correct, whole.argmax(-1) == ids[:, 1:])

    assert_scored()
    with normattn.extend(model, "ReRoPE-logn+", window=3):
        assert_scored()


# Decoding keeps rotated keys beside the cache; how many are rotated is why they are kept.


@pytest.fixture(params=["LeakyReRoPE(window=3,s=2.5)", "DynamicNTK", "ReRoPE(window=3)-logn+"])
def extended(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A model in float64, extended."""
    model = build("Llama").double()
    with normattn.extend(model, request.param):
        yield model


def _step(model: Any, ids: Tensor, cache: Any) -> Tensor:
    return logits(model, ids, past_key_values=cache, use_cache=True)


def _assert_read(found: Tensor, model: Any, ids: Tensor) -> None:
    """The last rows are those of one forward without a cache."""
    whole = logits(model, ids)[:, -found.shape[1] :]
    torch.testing.assert_close(found, whole, rtol=1e-9, atol=1e-9)


def test_only_new_keys_are_rotated(monkeypatch: pytest.MonkeyPatch) -> None:
    rotated: list[int] = []
    own = RotatedKeyCache.rotated

    def counted(self: Any, name: Any, k: Tensor, rotate: Callable[[int], Tensor]) -> Tensor:
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
    ids, other, cache = tokens(2, COUNT), tokens(2, COUNT).flip(0), _CACHE()
    stepwise(extended, ids[:, :12], (9, 1, 1, 1), cache)
    cache.reorder_cache(torch.tensor([1, 0]))  # as a beam search does
    _assert_read(_step(extended, other[:, 12:13], cache), extended, other[:, :13])
    cache.crop(-3)  # taken back, and another way gone
    changed = torch.cat((other[:, :10], ids[:, 10:14]), 1)
    found = stepwise(extended, changed[:, 10:], (1, 1, 1, 1), cache)
    _assert_read(found, extended, changed)
    fresh = _CACHE()
    stepwise(extended, ids[:, :14], (13, 1), fresh)
    for layer, source in zip(cache.layers, fresh.layers, strict=True):
        layer.keys.copy_(source.keys)  # written to in place
        layer.values.copy_(source.values)
    _assert_read(_step(extended, ids[:, 14:15], cache), extended, ids[:, :15])


def test_threads_decode_side_by_side(extended: Any) -> None:
    texts = [tokens(1, COUNT, seed) for seed in range(3)]

    def decode(ids: Tensor) -> Tensor:
        return stepwise(extended, ids, (COUNT - 8, 1, 1, 1, 1, 4))

    with ThreadPoolExecutor(len(texts)) as pool:
        for out, ids in zip(pool.map(decode, texts), texts, strict=True):
            _assert_read(out, extended, ids)


def test_two_caches_in_turn(extended: Any) -> None:
    one, other = tokens(1, COUNT), tokens(1, COUNT).flip(1)
    caches = {_CACHE(): one, _CACHE(): other}
    for a, b in pairwise((0, *range(COUNT - 5, COUNT + 1))):
        for cache, ids in caches.items():
            _assert_read(_step(extended, ids[:, a:b], cache), extended, ids[:, :b])
    first = next(iter(caches))
    copied = copy.deepcopy(first)  # a prompt that several texts share
    for cache, token in ((first, one[:, :1]), (copied, other[:, :1])):
        _assert_read(_step(extended, token, cache), extended, torch.cat((one, token), 1))
