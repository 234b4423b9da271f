"""Our models as transformers' own: the Auto classes, files, losses, masks, what is refused."""

from __future__ import annotations

import json
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


def causal(**more: Any) -> CausalLM:
    torch.manual_seed(0)
    return CausalLM(CausalLMConfig(**{**SIZES, **more})).eval()


def masked(**more: Any) -> MaskedLM:
    torch.manual_seed(0)
    return MaskedLM(MaskedLMConfig(**{**SIZES, **more})).eval()


def classifier() -> Classifier:
    torch.manual_seed(0)
    return Classifier(ClassifierConfig(labels=5, **SIZES)).eval()


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
    model = make(**more) if more else make()
    wrapped = normattn.hf.wrap(model)
    assert torch.equal(logits(wrapped), logits(model))
    wrapped.save_pretrained(tmp_path)
    again = auto.from_pretrained(tmp_path)
    assert type(again) is type(wrapped)
    assert not again.training
    assert again.model.config == model.config
    assert AutoConfig.from_pretrained(tmp_path).ours == model.config
    assert torch.equal(logits(again), logits(model))
    for name, value in model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], value), name


def test_labels_give_the_cross_entropy_of_what_follows() -> None:
    wrapped = normattn.hf.wrap(causal())
    labels = IDS.clone()
    labels[0, :4] = -100
    found = wrapped(IDS, labels=labels)
    scores = torch.log_softmax(found.logits.double(), -1)
    by_hand = [
        -scores[row, at, IDS[row, at + 1]]
        for row in range(3)
        for at in range(8)
        if row > 0 or at + 1 >= 4
    ]
    assert found.loss.item() == pytest.approx(torch.stack(by_hand).mean().item(), rel=1e-6)
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
    wrapped = normattn.hf.wrap(make())
    padded = torch.cat((torch.zeros(3, 4, dtype=torch.long), IDS), 1)
    mask = (torch.arange(13) >= 4).long().expand(3, -1)
    found, wanted = logits(wrapped, padded, attention_mask=mask), logits(wrapped)
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
    with pytest.raises(InputError, match=r"attention_mask must be \(3, 9\)"):
        wrapped(IDS, attention_mask=torch.ones(3, 4))
    with pytest.raises(InputError, match="attention_mask"):
        wrapped(IDS, attention_mask=torch.full((3, 9), 2))
    with pytest.raises(InputError, match="token ids run from"):
        wrapped(IDS + 40)
    with pytest.raises(InputError, match="whole numbers"):
        wrapped(IDS.float())
    with pytest.raises(InputError, match="whole numbers"):
        wrapped()
    with pytest.raises(InputError, match="keeps no gradients"):
        wrapped(IDS, use_cache=True)
    with pytest.raises(InputError, match="a DynamicCache"):
        wrapped(IDS, past_key_values=DynamicCache())
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
