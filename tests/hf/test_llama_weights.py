"""Weights of Llama, Mistral, Qwen2 and Qwen3 models into ours and back: the same logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import normattn.hf
from normattn import InputError
from normattn.hf import from_llama, to_llama, wrap
from normattn.models import CausalLM, CausalLMConfig, load_model, save_model

from .families import build, logits, tokens

LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5000.0, "factor": 4.0, "low_freq_factor": 0.5}
LLAMA3 |= {"high_freq_factor": 3.0, "original_max_position_embeddings": 10}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("Llama", {}),
    ("Llama", {"head_dim": 12, "tie_word_embeddings": True, "rms_norm_eps": 1e-3}),
    ("Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 300.5}}),
    ("Llama", {"rope_parameters": LINEAR}),
    ("Llama", {"rope_parameters": LLAMA3, "head_dim": 16}),
    ("Qwen3", {"rope_parameters": LLAMA3}),
    ("Mistral", {"num_key_value_heads": 1}),
    ("Qwen2", {"use_sliding_window": False, "sliding_window": None, "layer_types": None}),
    ("Qwen3", {"rms_norm_eps": 1e-5}),
    # The shape counts, not the name.
    ("InternLM3", {}),
    ("IQuestCoder", {}),
]


def assert_same(found: Tensor, wanted: Tensor) -> None:
    """To 1e-5 of the largest logit; these weights are large, so that a wrong position shows."""
    assert float((found - wanted).abs().max()) < 1e-5 * float(wanted.abs().max())


@pytest.mark.parametrize(("family", "more"), CASES)
def test_the_same_logits_there_and_back(family: str, more: dict[str, Any], tmp_path: Path) -> None:
    theirs, ids = build(family, **more), tokens(length=40)
    wanted = logits(theirs, ids)
    ours = from_llama(theirs)
    assert not ours.training
    with torch.no_grad():
        assert_same(ours(ids), wanted)
        save_model(ours, tmp_path / "model")
        assert torch.equal(load_model(tmp_path / "model").eval()(ids), ours(ids))
    again = to_llama(ours)
    kind = family if family.startswith("Qwen") else "Llama"
    assert type(again) is getattr(transformers, f"{kind}ForCausalLM")
    assert_same(logits(again, ids), wanted)
    torch.testing.assert_close(again.state_dict(), theirs.state_dict(), rtol=0, atol=0)
    again.save_pretrained(tmp_path / "theirs")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")
    assert torch.equal(logits(loaded, ids), logits(again, ids))


def test_the_weights_are_copies_of_the_same_type() -> None:
    theirs = build("Llama").to(torch.bfloat16)
    ours = from_llama(theirs)
    assert {weight.dtype for weight in ours.parameters()} == {torch.bfloat16}
    places, own = (
        {weight.untyped_storage().data_ptr() for weight in model.parameters()}
        for model in (theirs, ours)
    )
    assert not places & own


def test_a_head_of_zeros_becomes_one() -> None:
    theirs = build("Llama")
    torch.nn.init.zeros_(theirs.lm_head.weight)
    assert not from_llama(theirs).head_weight.any()


def test_what_we_train_becomes_theirs_and_generates_the_same() -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 64, "dim": 32, "layers": 2, "heads": 4, "kv_heads": 2}
    model = CausalLM(CausalLMConfig(**sizes, train_length=32, qkv_bias=True)).eval()
    bias = model.get_parameter("blocks.0.mixer.sublayer.qkv.bias")
    assert not bias.any()
    with torch.no_grad():
        bias.normal_()
    ids = tokens(length=9)
    how: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    found = to_llama(model).generate(ids, **how)
    assert torch.equal(found, normattn.hf.wrap(model).generate(ids, **how))


@pytest.mark.parametrize("method", ["PI", "NTK", "YaRN"])
def test_a_method_after_training_does_not_become_one_trained_in(method: str) -> None:
    theirs, why = build("Llama"), rf"is extended, by {method}.*remove\(\) the extension"
    with normattn.extend(theirs, method, factor=4), pytest.raises(InputError, match=why):
        from_llama(theirs)
    assert from_llama(theirs).config.score.rope_scaling is None


_WARMER = {"rope_type": "default", "rope_theta": 10000.0, "llama_4_scaling_beta": 0.5}
_WARMER |= {"original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("family", "more", "reason"),
    [
        ("Llama", {"rope_parameters": {**LINEAR, "rope_type": "yarn"}}, "scaled by 'yarn'"),
        ("Llama", {"attention_bias": True}, r"differ by model\.layers\.0\.self_attn\.o_proj\.bias"),
        ("Llama", {"mlp_bias": True}, r"differ by model\.layers\.0\.mlp"),
        ("Llama", {"hidden_act": "gelu"}, "computes other logits with them"),
        ("Qwen2", {}, "a sliding window"),
        ("Mistral", {"sliding_window": 4}, "a sliding window"),
        ("Gemma", {}, "computes other logits with them"),
        ("Olmo2", {}, "differ by"),
        ("Granite", {}, "computes other logits with them"),
        ("GPTNeoX", {}, "its configuration lacks"),
        ("Arcee", {}, "cannot become a CausalLM"),
        (
            "Ministral3",
            {"sliding_window": None, "rope_parameters": _WARMER, "head_dim": 8},
            "the setting llama_4_scaling_beta of rotary positions",
        ),
    ],
)
def test_what_our_settings_cannot_say(family: str, more: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        from_llama(build(family, **more))


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"score": "KNA"}, "the score KNA@8 has no counterpart"),
        ({"score": "Baseline-YaRN(factor=2)"}, "the spectrum YaRN has no counterpart"),
        ({"score": "Baseline-RoPE(layout=interleaved)"}, "has no counterpart"),
        ({"score": "QKRMSNorm(eps=0.1)"}, "norms' own eps"),
        ({"score": "QKRMSNorm", "qkv_bias": True}, "biases the output too"),
        ({"placement": "PostLN"}, "placement 'PostLN'"),
        ({"norm": "layer"}, "norm 'layer'"),
        ({"feed_forward": "gelu"}, "feed_forward 'gelu'"),
        ({"shared_layers": True}, "shared_layers True"),
    ],
)
def test_what_their_settings_cannot_say(more: dict[str, Any], reason: str) -> None:
    config = CausalLMConfig(vocab_size=8, dim=8, layers=2, heads=2, train_length=8, **more)
    with pytest.raises(InputError, match=reason):
        to_llama(CausalLM(config))


def test_a_wrapped_model_is_none_of_ours() -> None:
    config = CausalLMConfig(vocab_size=8, dim=8, layers=1, heads=2, train_length=8)
    with pytest.raises(InputError, match=r"\.model of a wrapped one.*NormattnForCausalLM"):
        to_llama(wrap(CausalLM(config)))
