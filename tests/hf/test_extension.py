"""The handle: what it says, what it leaves untouched, what it keeps, what it refuses."""

from __future__ import annotations

import copy
import itertools
import json
import pickle
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig

import normattn
from normattn import InputError
from normattn.hf import extension_of, from_llama
from normattn.hf.load import load_unmodified

from . import tiny
from .families import LENGTH, build, configuration, logits, model_of, tokens


def test_resolved_values_say_what_was_found() -> None:
    with normattn.extend(model_of("Glm4"), "ReRoPE-logn+") as extension:
        found = extension.resolved
    assert (found.train_length, found.train_length_from) == (LENGTH, "max_position_embeddings")
    assert found.method == "ReRoPE(window=2)-logn+"
    assert found.parameters == {"window": LENGTH // 4}
    assert (found.base, found.head_dim, found.rotated) == (10000.0, 8, 4)
    assert (found.layout, found.attention) == ("interleaved", "normattn")
    assert (found.extended, found.cached_keys) == ((0, 1), "unrotated")
    assert "ReRoPE(window=2)-logn+, trained on 8 tokens" in str(found)
    with normattn.extend(model_of("Gemma2"), "PI", factor=2, train_length=4) as extension:
        found = extension.resolved
    assert (found.train_length, found.train_length_from) == (4, "given")
    assert (found.left, found.attention, found.cached_keys) == ((0,), "stock", "rotated")
    assert "layers within a window, as trained: 0" in str(found)
    with normattn.extend(model_of("SmolLM3"), "logn+") as extension:
        assert extension.resolved.without_positions == (1,)


@pytest.mark.parametrize(
    ("method", "values"),
    [("LeakyReRoPE", {"window": 2, "s": 5.0}), ("SelfExtend", {"window": 2, "group": 6})],
)
def test_a_factor_finds_what_the_method_needs(method: str, values: dict[str, Any]) -> None:
    """Four training lengths into one: (4·8 − 2)/(8 − 2), and the smallest group that fits."""
    with normattn.extend(model_of("Llama"), method, factor=4) as extension:
        assert extension.resolved.parameters == values


def test_nothing_is_left_behind() -> None:
    """Attributes, hooks, the configuration, and which layers are in training."""
    model = build("Qwen2").train()
    model.model.layers[0].mlp.eval()

    def state() -> list[Any]:
        parts = [
            (each.training, len(each._forward_pre_hooks), len(each._forward_hooks))
            for each in model.modules()
        ]
        own = dict(model.model.layers[0].self_attn.__dict__)
        return [parts, own, id(model.config), model.config.to_json_string()]

    before, config = state(), model.config
    extension = normattn.extend(model, "ReRoPE-logn+", window=3)
    assert extension.active
    assert [training for training, *_ in state()[0]] == [training for training, *_ in before[0]]
    assert model.config is not config
    assert config.to_json_string() == before[-1]
    extension.remove()
    extension.remove()
    assert not extension.active
    assert state() == before


def test_another_model_of_the_same_configuration_is_untouched() -> None:
    config, ids = configuration("Llama"), tokens()
    kind: Any = type(model_of("Llama"))
    one, other = kind(config).eval(), kind(config).eval()
    as_trained = logits(other, ids)
    with normattn.extend(one, "ReRoPE-logn+", window=3):
        assert torch.equal(logits(other, ids), as_trained)
        with normattn.extend(other, "YaRN-logn+", factor=4):
            assert not torch.equal(logits(other, ids), as_trained)
        assert torch.equal(logits(other, ids), as_trained)


NATIVE = ("PI(factor=4)", "YaRN(factor=4)")


@pytest.mark.parametrize("method", ["ReRoPE-logn+", "YaRN(factor=4)-logn+", *NATIVE])
def test_saved_with_its_extension(method: str, tmp_path: Path) -> None:
    """What transformers has words for is applied by its own from_pretrained too."""
    model, ids = build("Llama"), tokens()
    as_trained = logits(model, ids)
    with normattn.extend(model, method):
        extended = logits(model, ids)
        model.save_pretrained(tmp_path)
    record = json.loads((tmp_path / "config.json").read_text())["normattn"]
    assert record["train_length"] == LENGTH
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    if method in NATIVE:
        torch.testing.assert_close(logits(plain, ids), extended, rtol=0, atol=1e-5)
        assert plain.config.max_position_embeddings == 4 * LENGTH
        for use in (lambda: normattn.extend(plain, "NTK", factor=2), lambda: from_llama(plain)):
            with pytest.raises(InputError, match=r"saved under (PI|YaRN)\(.* has applied it"):
                use()
    else:
        assert torch.equal(logits(plain, ids), as_trained)
        assert plain.config.max_position_embeddings == LENGTH
    again = normattn.from_pretrained(str(tmp_path))
    assert torch.equal(logits(again, ids), extended)
    extension_of(again).remove()  # type: ignore[union-attr]
    assert torch.equal(logits(again, ids), as_trained)
    again.save_pretrained(tmp_path / "again")
    with pytest.raises(InputError, match="names no extension"):
        normattn.from_pretrained(str(tmp_path / "again"))
    with normattn.extend(again, method) as extension:
        assert extension.resolved.train_length == LENGTH
        assert torch.equal(logits(again, ids), extended)
        again.save_pretrained(tmp_path / "longer")
    found, told = load_unmodified(tmp_path / "longer")
    assert torch.equal(logits(found, ids), as_trained)
    assert told == record


@pytest.mark.parametrize("kind", ["LlamaModel", "LlamaForSequenceClassification", "Llava"])
def test_the_class_that_was_saved_comes_back(kind: str, tmp_path: Path) -> None:
    model, ids, classes = build("Llama"), tokens(), cast(Any, transformers)
    saved = model.model
    if kind == "Llava":
        vision = transformers.CLIPVisionConfig(**tiny.shrunk(transformers.CLIPVisionConfig))
        config = transformers.LlavaConfig(text_config=model.config, vision_config=vision)
        model = saved = classes.LlavaForConditionalGeneration(config).eval()
    elif kind != "LlamaModel":
        model = saved = classes.LlamaForSequenceClassification(model.config).eval()
    with normattn.extend(model, "ReRoPE", window=3), torch.no_grad():
        extended = saved(ids)[0]
        saved.save_pretrained(tmp_path)
    again = normattn.from_pretrained(str(tmp_path))
    assert type(again) is type(saved)
    with torch.no_grad():
        assert torch.equal(again(ids)[0], extended)


@pytest.mark.parametrize(
    ("family", "method", "words"),
    [
        ("gemma3_text", "YaRN", True),  # by type of layer: those within a window keep theirs
        ("deepseek_v2", "YaRN", True),  # complex numbers
        ("llama", "Llama3", True),
        ("gpt_neox", "PI", True),  # a part of the head
        ("gemma2", "YaRN", False),  # its windows share the rope parameters
        ("phimoe", "YaRN", False),  # its own code wants other words
        ("granite_swa", "PI", False),  # a base for each layer
    ],
)
def test_native_words_where_they_mean_the_same(
    family: str, method: str, words: bool, tmp_path: Path
) -> None:
    model, ids = tiny.build(family), tokens()
    as_trained = logits(model, ids)
    with normattn.extend(model, method, factor=4):
        extended = logits(model, ids)
        model.save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    meant = extended if words else as_trained
    torch.testing.assert_close(logits(plain, ids), meant, rtol=0, atol=1e-4)
    record = json.loads((tmp_path / "config.json").read_text())["normattn"]
    assert ("trained" in record) == words


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("RoPEX", {}, "'RoPEX'"),
    ("KNA", {}, "KNA is a training-time component"),
    ("", {}, "needs a method by name"),
    ("StreamingLLM", {}, "hides keys"),
    ("ReRoPE", {"window": LENGTH + 1}, "window=9 is larger than the training length of 8"),
    ("ReRoPE", {"window": 0}, "window must be a number of at least 1"),
    ("YaRN", {"factor": 0.5}, "factor must be a number of at least 1"),
    ("YaRN", {}, "needs factor="),
    ("LeakyReRoPE", {}, "needs s=…"),
    ("ReRoPE", {"factor": 2}, "ReRoPE takes no factor"),
    ("SelfExtend", {"group": 2, "factor": 2}, "takes no factor"),
    ("ReRoPE", {"size": 3}, "'size'"),
    ("LeakyReRoPE", {"factor": float("inf")}, "factor must be a number of at least 1"),
    ("ReRoPE", {"train_length": "8"}, "whole number of at least 2, but it is '8'"),
    ("ReRoPE", {"train_length": 1}, "a training length must be a whole number of at least 2"),
    ("YaRN-ReRoPE", {"factor": 2}, "cannot be combined"),
]


@pytest.mark.parametrize(("method", "values", "reason"), REFUSED)
def test_refused_values(method: str, values: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        normattn.extend(model_of("Llama"), method, **values)
    assert extension_of(model_of("Llama")) is None


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
TWICE = {**DYNAMIC, "rope_type": "yarn", "original_max_position_embeddings": 4}


def test_refused_models() -> None:
    gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=9, n_positions=8))
    endless = build("Llama")
    endless.config.__dict__["max_position_embeddings"] = None
    for model, reason in (
        (torch.nn.Linear(2, 2), "takes a model of transformers"),
        (gpt2, "not a rotary model"),
        (build("Mistral", sliding_window=4), "all its layers attend within a window of 4"),
        (build("Llama", rope_parameters=DYNAMIC), "dynamic rotary spectrum"),
        (build("SmolLM3", no_rope_layers=[0, 0]), "none of its layers with full attention"),
        (endless, "train_length=…"),
        (build("Llama", rope_parameters=TWICE), "max_position_embeddings="),
    ):
        with pytest.raises(InputError, match=reason):
            normattn.extend(model, "ReRoPE", window=3)
    with pytest.raises(InputError, match="already scaled, and NTK "):
        normattn.extend(build("Llama", rope_parameters=TWICE), "NTK", factor=2, train_length=8)


def test_extended_twice_copied_or_changed() -> None:
    model, ids = build("Llama"), tokens()
    with normattn.extend(model, "ReRoPE", window=3):
        for other in (model, model.model):
            with pytest.raises(InputError, match="already extended, by ReRoPE: remove"):
                normattn.extend(other, "YaRN", factor=2)
        # TRL copies the model that it trains: it must do so before.
        for copied, part in itertools.product((copy.deepcopy, pickle.dumps), (model, model.model)):
            with pytest.raises(InputError, match="cannot be copied"):
                copied(part)
        with pytest.raises(InputError, match="cannot be copied"):
            copy.deepcopy(model.model.layers[0])
        for config in (copy.deepcopy(model.config), pickle.loads(pickle.dumps(model.config))):
            assert (type(config), config._attn_implementation) == (LlamaConfig, "sdpa")
        with pytest.raises(InputError, match="takes no output_attentions"):
            model(ids, output_attentions=True)
        with pytest.raises(InputError, match="position_ids do not number"):
            model(ids, position_ids=2 * torch.arange(ids.shape[1])[None])
        whole = torch.ones(ids.shape[1], ids.shape[1]).tril()[None, None]
        for own in (whole.long(), whole[:, :, :1].long(), whole.int()):
            with pytest.raises(InputError, match="must be boolean"):
                logits(model, ids[:, : own.shape[2]], attention_mask=own)
        with pytest.raises(InputError, match="changed to eager while the model is extended"):
            model.set_attn_implementation("eager")
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(logits(copy.deepcopy(model), ids), logits(model, ids))
