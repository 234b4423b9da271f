"""`generate` of transformers on our models: greedy, sampling, beams, ragged prompts, the cache."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

import normattn.hf
from normattn import InputError
from normattn.hf.modeling_normattn import NormattnCache
from normattn.models import CausalLM, CausalLMConfig
from normattn.score import ScoreSpec

# A plain score, unrotated keys, a window, packing, residual scores, a gated unit.
SCORES = ["KNA-logn", "Baseline-SlidingWindow(window=5)", "Baseline-Packed", "Baseline-RealFormer"]
PROMPTS = torch.randint(1, 40, (2, 7), generator=torch.Generator().manual_seed(1))
HOW: dict[str, Any] = {"max_new_tokens": 9, "pad_token_id": 0, "do_sample": False}


@lru_cache
def model_of(score: str) -> CausalLM:
    torch.manual_seed(3)
    settings: dict[str, Any] = {"vocab_size": 40, "dim": 24, "layers": 2, "heads": 2}
    config = CausalLMConfig(**settings, train_length=32, init_std=0.4, score=ScoreSpec.parse(score))
    return CausalLM(config).eval()


def wrapped_of(score: str) -> Any:
    return normattn.hf.wrap(model_of(score))


def padded(ids: Tensor, tokens: int = 3) -> dict[str, Tensor]:
    mask = torch.ones_like(ids)
    zeros = torch.zeros(ids.shape[0], tokens, dtype=torch.long)
    return {"input_ids": torch.cat((zeros, ids), 1), "attention_mask": torch.cat((zeros, mask), 1)}


@pytest.mark.parametrize("score", SCORES)
def test_greedy_is_ours_with_and_without_a_cache_and_with_padding(score: str) -> None:
    wrapped = wrapped_of(score)
    ours = model_of(score).generate(PROMPTS.tolist(), 9)
    wanted = torch.tensor([answer.tokens for answer in ours])
    assert len({tuple(row) for row in wanted.tolist()}) == 2
    assert torch.equal(wrapped.generate(PROMPTS, **HOW)[:, 7:], wanted)
    assert torch.equal(wrapped.generate(PROMPTS, use_cache=False, **HOW)[:, 7:], wanted)
    assert torch.equal(wrapped.generate(**padded(PROMPTS), **HOW)[:, 10:], wanted)
    assert torch.equal(wrapped.generate(**padded(PROMPTS), use_cache=False, **HOW)[:, 10:], wanted)


def test_ragged_prompts_are_answered_each_by_itself() -> None:
    wrapped = wrapped_of(SCORES[0])
    batch = torch.stack((PROMPTS[0], torch.cat((torch.zeros(4).long(), PROMPTS[1, 4:]))))
    mask = torch.ones_like(batch)
    mask[1, :4] = 0
    found = wrapped.generate(batch, attention_mask=mask, **HOW)[:, 7:]
    for row, prompt in enumerate((PROMPTS[:1], PROMPTS[1:, 4:])):
        alone = wrapped.generate(prompt, **HOW)[:, prompt.shape[1] :]
        assert torch.equal(found[row : row + 1], alone)


@pytest.mark.parametrize("score", SCORES)
def test_beams_are_reordered_with_their_cache(score: str) -> None:
    wrapped, how = wrapped_of(score), {**HOW, "num_beams": 4}
    found = wrapped.generate(PROMPTS, **how)
    assert torch.equal(found, wrapped.generate(PROMPTS, use_cache=False, **how))
    assert torch.equal(found[:, 7:], wrapped.generate(**padded(PROMPTS), **how)[:, 10:])
    assert not torch.equal(found, wrapped.generate(PROMPTS, **HOW))


def test_a_conversation_goes_on_from_its_cache() -> None:
    wrapped = wrapped_of(SCORES[0])
    cache = wrapped.new_cache(64)
    first = wrapped.generate(PROMPTS, past_key_values=cache, **HOW)
    assert cache.get_seq_length() == 15
    more = torch.cat((first, PROMPTS), 1)
    found = wrapped.generate(more, past_key_values=cache, **HOW)
    assert torch.equal(found, wrapped.generate(more, **HOW))


@torch.no_grad()
def test_the_cache_is_cut_and_reordered() -> None:
    wrapped = wrapped_of(SCORES[0])
    cache = wrapped(PROMPTS).past_key_values
    assert isinstance(cache, NormattnCache)
    assert (len(cache), cache.is_croppable, cache.is_compileable) == (2, True, False)
    cache.crop(-3)
    again = wrapped(PROMPTS[:, 4:], past_key_values=cache).logits
    torch.testing.assert_close(again, wrapped(PROMPTS).logits[:, 4:])
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.crop(-3)
    swapped = wrapped(PROMPTS[[1, 0], 4:], past_key_values=cache).logits
    torch.testing.assert_close(swapped, again[[1, 0]])
    cache.reset()
    assert not cache.get_seq_length()


def test_what_is_refused() -> None:
    wrapped = wrapped_of(SCORES[0])
    with pytest.raises(InputError, match="cache_implementation='static' cannot"):
        wrapped.generate(PROMPTS, cache_implementation="static", **HOW)
    with pytest.raises(InputError, match="room for 10 tokens"):
        wrapped.generate(PROMPTS, past_key_values=wrapped.new_cache(10), **HOW)
    cache = wrapped.new_cache()
    with pytest.raises(InputError, match="negative number"):
        cache.crop(3)
    with pytest.raises(InputError, match="by themselves"):
        cache.update(PROMPTS, PROMPTS, 0)
    with pytest.raises(InputError, match="pad on the left"), torch.no_grad():
        wrapped(PROMPTS, attention_mask=PROMPTS.ne(PROMPTS[0, 6]).long())
