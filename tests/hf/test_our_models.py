"""Our models as transformers' own: files, losses, masks, `generate`, what is refused."""

from __future__ import annotations

import json
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    DynamicCache,
)

import normattn.hf
from normattn import InputError
from normattn.models import CausalLM, CausalLMConfig, MaskedLM, MaskedLMConfig
from normattn.models.classifier import Classifier
from normattn.models.config import ClassifierConfig

SIZES: dict[str, Any] = {"vocab_size": 40, "dim": 16, "layers": 2, "heads": 2, "train_length": 12}
IDS = torch.randint(1, 40, (3, 9), generator=torch.Generator().manual_seed(1))


def _of(kind: Any, config: Any, **fields: Any) -> Any:
    torch.manual_seed(0)
    return kind(config(**{**SIZES, **fields})).eval()


causal = partial(_of, CausalLM, CausalLMConfig)
masked = partial(_of, MaskedLM, MaskedLMConfig)
classifier = partial(_of, Classifier, ClassifierConfig, labels=5)


def padded(ids: Tensor, tokens: int = 4) -> dict[str, Tensor]:
    """With padding on the left."""
    mask = F.pad(torch.ones_like(ids), (tokens, 0))
    return {"input_ids": F.pad(ids, (tokens, 0)), "attention_mask": mask}


@torch.no_grad()
def logits(model: nn.Module, ids: Tensor = IDS, **more: Any) -> Tensor:
    found = model(ids, **more)
    return found if isinstance(found, Tensor) else found.logits


MODELS = [
    (AutoModelForCausalLM, causal, {}),
    (AutoModelForCausalLM, causal, {"tie_head": False, "kv_heads": 1, "feed_forward": "gelu"}),
    (AutoModelForCausalLM, causal, {"block": "gau", "heads": 1, "key_size": 8}),
    (AutoModelForCausalLM, causal, {"shared_layers": True, "placement": "DeepNorm"}),
    (AutoModelForCausalLM, causal, {"score": "QKRMSNorm-T5Bias-Gate"}),
    (AutoModelForMaskedLM, masked, {}),
    (AutoModelForMaskedLM, masked, {"tie_head": False, "exits": True, "score": "QKBatchNorm"}),
    (AutoModelForSequenceClassification, classifier, {}),
]


@pytest.mark.parametrize(("auto", "make", "more"), MODELS)
def test_saved_and_loaded_by_the_auto_class_it_is_the_same(
    auto: Any, make: Any, more: dict[str, Any], tmp_path: Path
) -> None:
    model = make(**more)
    wrapped = normattn.hf.wrap(model)
    assert torch.equal(logits(wrapped), logits(model))
    wrapped.save_pretrained(tmp_path)
    again = auto.from_pretrained(tmp_path)
    assert type(again) is type(wrapped)
    assert not again.training
    assert again.model.config == model.config
    assert AutoConfig.from_pretrained(tmp_path).ours == model.config
    assert torch.equal(logits(again), logits(model))
    torch.testing.assert_close(again.model.state_dict(), model.state_dict(), rtol=0, atol=0)


def test_labels_give_the_cross_entropy_of_what_follows() -> None:
    wrapped = normattn.hf.wrap(causal())
    labels = IDS.clone()
    labels[0, :4] = -100
    found = wrapped(IDS, labels=labels)
    by_hand = F.cross_entropy(found.logits[:, :-1].double().flatten(0, 1), labels[:, 1:].flatten())
    assert found.loss.item() == pytest.approx(by_hand.item(), rel=1e-6)
    found.loss.backward()
    assert wrapped.model.embedding.weight.grad.abs().max() > 0
    whole = wrapped(IDS, labels=IDS).loss
    assert whole.item() == pytest.approx(wrapped.model.loss(IDS).loss.item(), rel=1e-6)


def test_labels_of_a_masked_model() -> None:
    model = masked()
    wrapped = normattn.hf.wrap(model)
    labels = torch.full_like(IDS, -100)
    labels[:, 2] = IDS[:, 2]
    ids = IDS.clone()
    ids[:, 2] = model.config.mask_id
    places = torch.full((3, 1), 2)
    wanted = model.loss(ids, places, IDS[:, 2:3]).loss
    assert wrapped(ids, labels=labels).loss.item() == pytest.approx(wanted.item(), rel=1e-6)


def test_labels_of_a_classifier() -> None:
    model = classifier()
    names = {number: f"relation {number}" for number in range(5)}
    wrapped = normattn.hf.wrap(model, id2label=names)
    assert wrapped.config.id2label == names
    many = torch.randint(0, 2, (3, 5)).float()
    wanted = model.loss(IDS, None, many)
    assert wrapped(IDS, labels=many).loss.item() == pytest.approx(wanted.item(), rel=1e-6)
    one = normattn.hf.wrap(model, problem_type="single_label_classification")
    numbers = torch.tensor([0, 4, 2])
    wanted = F.cross_entropy(logits(model), numbers)
    assert one(IDS, labels=numbers).loss.item() == pytest.approx(wanted.item(), rel=1e-6)
    with pytest.raises(ValueError, match="size"):
        wrapped(IDS, labels=numbers)


@pytest.mark.parametrize("make", [causal, masked, classifier])
def test_padding_changes_nothing(make: Any) -> None:
    wrapped, given = normattn.hf.wrap(make()), padded(IDS)
    found, wanted = logits(wrapped, given.pop("input_ids"), **given), logits(wrapped)
    torch.testing.assert_close(found if found.dim() == 2 else found[:, 4:], wanted)


@pytest.mark.parametrize("make", [causal, masked, classifier])
def test_arguments_of_other_models_are_refused(make: Any) -> None:
    """None and False, which PEFT passes, mean nothing."""
    wrapped = normattn.hf.wrap(make())
    found = logits(wrapped, inputs_embeds=None, output_attentions=False, return_dict=True)
    assert torch.equal(found, logits(wrapped))
    for name, value in (("inputs_embeds", torch.zeros(3, 9, 16)), ("output_attentions", True)):
        with pytest.raises(InputError, match=f"takes no {name}"):
            wrapped(IDS, **{name: value})
    wrapped.config.output_hidden_states = True
    with pytest.raises(InputError, match="takes no output_hidden_states"):
        wrapped(IDS)


def test_what_is_refused(tmp_path: Path) -> None:
    wrapped = normattn.hf.wrap(causal())
    refused: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        ((IDS,), {"attention_mask": torch.ones(3, 4)}, r"attention_mask must be \(3, 9\)"),
        ((IDS,), {"attention_mask": torch.full((3, 9), 2)}, "attention_mask"),
        ((IDS + 40,), {}, "token ids run from"),
        ((IDS.float(),), {}, "whole numbers"),
        ((), {}, "whole numbers"),
        ((IDS,), {"use_cache": True}, "keeps no gradients"),
        ((IDS,), {"past_key_values": DynamicCache()}, "a DynamicCache"),
    ]
    for given, more, why in refused:
        with pytest.raises(InputError, match=why):
            wrapped(*given, **more)
    with pytest.raises(InputError, match="no counterpart in transformers"):
        normattn.hf.wrap(nn.Linear(2, 2))
    wrapped.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.final_norm.gain"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=r"model\.final_norm\.gain is missing"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    stored["settings"]["score"] = "KNAA"
    (tmp_path / "config.json").write_text(json.dumps(stored))
    with pytest.raises(InputError, match="did you mean KNA"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(InputError, match="needs settings"):
        AutoConfig.for_model("normattn")
    with pytest.raises(InputError, match="settings say 5 labels"):
        normattn.hf.wrap(classifier(), num_labels=3)


# `generate` of transformers: greedy, sampling, beams, ragged prompts, the cache.

# A plain score, unrotated keys, a window, packing, residual scores, a gated unit.
SCORES = ["KNA-logn", "Baseline-SlidingWindow(window=5)", "Baseline-Packed", "Baseline-RealFormer"]
PROMPTS = torch.randint(1, 40, (2, 7), generator=torch.Generator().manual_seed(1))
HOW: dict[str, Any] = {"max_new_tokens": 9, "pad_token_id": 0, "do_sample": False}


@lru_cache
def wrapped_of(score: str) -> Any:
    return normattn.hf.wrap(causal(dim=24, train_length=32, init_std=0.4, score=score))


@pytest.mark.parametrize("score", SCORES)
def test_greedy_is_ours_with_and_without_a_cache_and_with_padding(score: str) -> None:
    wrapped = wrapped_of(score)
    ours = wrapped.model.generate(PROMPTS.tolist(), 9)
    wanted = torch.tensor([answer.tokens for answer in ours])
    assert len({tuple(row) for row in wanted.tolist()}) == 2
    assert torch.equal(wrapped.generate(PROMPTS, **HOW)[:, 7:], wanted)
    assert torch.equal(wrapped.generate(PROMPTS, use_cache=False, **HOW)[:, 7:], wanted)
    assert torch.equal(wrapped.generate(**padded(PROMPTS), **HOW)[:, 11:], wanted)
    assert torch.equal(wrapped.generate(**padded(PROMPTS), use_cache=False, **HOW)[:, 11:], wanted)


def test_ragged_prompts_are_answered_each_by_itself() -> None:
    wrapped, mask = wrapped_of(SCORES[0]), torch.ones_like(PROMPTS)
    mask[1, :4] = 0
    found = wrapped.generate(PROMPTS * mask, attention_mask=mask, **HOW)[:, 7:]
    for row, prompt in enumerate((PROMPTS[:1], PROMPTS[1:, 4:])):
        alone = wrapped.generate(prompt, **HOW)[:, prompt.shape[1] :]
        assert torch.equal(found[row : row + 1], alone)


@pytest.mark.parametrize("score", SCORES)
def test_beams_are_reordered_with_their_cache(score: str) -> None:
    wrapped, how = wrapped_of(score), {**HOW, "num_beams": 4}
    found = wrapped.generate(PROMPTS, **how)
    assert torch.equal(found, wrapped.generate(PROMPTS, use_cache=False, **how))
    assert torch.equal(found[:, 7:], wrapped.generate(**padded(PROMPTS), **how)[:, 11:])
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


def test_what_generate_refuses() -> None:
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
