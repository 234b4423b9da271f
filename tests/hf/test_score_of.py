"""The score of a model's layers, read off them: every recipe's, and what has no name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from cli.conftest import Command
from normattn import InputError, ScoreSpec, score_of
from normattn.score.recipes import RECIPES

from . import tiny
from .families import configuration, logits, model_of, tokens

# Which layer is of which type follows from their number; Gemma's scale is that of the heads' size.
PLAIN: dict[str, Any] = {"layer_types": None, "no_rope_layers": None, "moe_layers": None}
PLAIN |= {"query_pre_attn_scalar": 16, "max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
FULL = {"mscale": 1.0, "mscale_all_dim": 1.0}


def _rope(spec: Any, **more: Any) -> dict[str, Any]:
    """Rotary parameters of this base, scaled as `more` says."""
    rope = {"rope_type": "default", "rope_theta": spec.position.base, **more}
    if rope["rope_type"] != "default":
        rope["original_max_position_embeddings"] = spec.train_length
    return {"rope_parameters": rope}


def _yarn(spec: Any, **more: Any) -> dict[str, Any]:
    return _rope(spec, rope_type="yarn", factor=spec.rope_scaling.factor, **more)


def _two_bases(spec: Any) -> dict[str, Any]:
    """Rotary parameters of layers within a window and of the others."""
    own, layout = _rope(spec)["rope_parameters"], spec.layout
    full = {"rope_type": "linear", "rope_theta": layout.base, "factor": layout.stretch}
    return {"rope_parameters": {"sliding_attention": own, "full_attention": full}}


# The family in transformers, the number of layers, and what its configuration has of the score.
MODELS: dict[str, tuple[str, int, Callable[[Any], dict[str, Any]]]] = {
    "Command-R7B": ("cohere2", 4, lambda s: {"sliding_window": s.window[0]}),
    "DeepSeek-V3": ("deepseek_v3", 2, lambda s: {"qk_nope_head_dim": 32, **_yarn(s, **FULL)}),
    "Gemma-2": (
        *("gemma2", 2),
        lambda s: {"attn_logit_softcapping": s.cap.cap, "sliding_window": s.layout.window},
    ),
    "Gemma-3": (
        *("gemma3_text", 6),
        lambda s: {"sliding_window": s.layout.window, **_two_bases(s)},
    ),
    "gpt-oss": (
        *("gpt_oss", 2),
        lambda s: {"sliding_window": s.layout.window, **_yarn(s, truncate=False)},
    ),
    "Llama-3.1": ("llama", 2, lambda s: _rope(s, **LLAMA3)),
    "Llama-4": (
        *("llama4_text", 4),
        lambda s: {
            "floor_scale": s.layout.length,
            "attention_chunk_size": s.chunk,
            "attn_scale": s.layout.beta,
        },
    ),
    "Ministral-3": (
        *("ministral3", 2),
        lambda s: _yarn(s, **FULL, llama_4_scaling_beta=s.logn.beta),
    ),
    "OLMo-2": ("olmo2", 2, lambda s: {"rms_norm_eps": 1e-6}),
    "Qwen2.5": ("qwen2", 2, lambda s: {}),
    "Qwen3": ("qwen3", 2, lambda s: {}),
    "Qwen3-Next": (
        *("qwen3_next", 4),
        lambda s: _rope(s, partial_rotary_factor=s.position.fraction),
    ),
    "SmolLM3": ("smollm3", 4, lambda s: {}),
}


def _small(text: str) -> str:
    """So small that windows, steps of temperature and chunks are passed within the tokens."""
    for large, small in (
        (r"window=\d+", "window=7"),
        (r"size=\d+", "size=11"),
        (r"(length=|@)16384", r"\g<1>9"),
        (r"@\d{4}$", "@64"),
        ("-IRoPE", "-IRoPE(length=9)"),
    ):
        text = re.sub(large, small, text)
    return text


@pytest.mark.parametrize(
    ("name", "text"),
    [(name, each) for name, text in RECIPES.items() for each in {text: 0, _small(text): 0}],
)
def test_the_recipe_is_what_is_read_off_the_layers(name: str, text: str) -> None:
    """As released and small; `attention` with it gives what each layer's own attention gave."""
    spec, (family, layers, more) = ScoreSpec.parse(text), MODELS[name]
    fields = {**PLAIN, "num_hidden_layers": layers, **_rope(spec), **more(spec)}
    read = score_of(tiny.build(family, **fields), 40)
    assert read.verified, str(read)
    assert len(read.layers) == (1 if name == "Qwen3-Next" else layers)
    for layer in read.layers:
        # A norm without a gain is the same before and after a rotation.
        wanted = str(spec.layer(layer.layer, layers)).replace("-RotateFirst", "")
        assert str(layer.spec) == wanted


def test_every_recipe_reads_and_prints() -> None:
    for name, text in RECIPES.items():
        spec = ScoreSpec.parse(name)
        assert spec == ScoreSpec.parse(text) == ScoreSpec.parse(name.lower())
        assert ScoreSpec.parse(str(spec)) == spec
        if spec.train_length is None:
            assert ScoreSpec.parse(f"{name}@512").train_length == 512
    with pytest.raises(InputError, match=r"gpt-oss.*4096.*512"):
        ScoreSpec.parse("gpt-oss@512")


DEEPSEEK = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "mscale": 0.5}
DEEPSEEK |= {"mscale_all_dim": 0.5, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("more", "score"),
    [
        ({"rope_interleave": False, "q_lora_rank": None}, "Baseline-PartialRoPE(side=last)"),
        # DeepSeek multiplies the whole score with what others multiply the turned features with.
        (
            {"rope_parameters": DEEPSEEK},
            "Baseline-PartialRoPE(layout=interleaved,side=last)-YaRN(factor=40,sharpness=0.05)@64",
        ),
    ],
)
def test_keys_of_latent_vectors_are_read(more: dict[str, Any], score: str) -> None:
    seen = score_of(tiny.build("deepseek_v3", **more))
    assert seen.verified, str(seen)
    assert {str(layer.spec) for layer in seen.layers} == {score}


def test_a_layer_that_runs_several_times_is_read_each_time() -> None:
    seen = score_of(tiny.build("hrm_text"))
    assert seen.verified, str(seen)
    assert len(seen.layers) > len({layer.layer for layer in seen.layers})


def test_an_indexer_that_leaves_no_key_out_is_not_shown() -> None:
    seen = score_of(tiny.build("glm_moe_dsa", index_topk=48))
    assert not seen.verified
    assert "its indexer leaves out none of 48 tokens: use more tokens" in str(seen)
    assert {layer.mask_note for layer in seen.layers} == {None}


def test_a_mask_by_the_text_is_an_operand() -> None:
    """Doge adds to the scores of a key by its values; on the page it hides the lowest as well."""
    seen = score_of(tiny.build("doge"))
    assert seen.verified, str(seen)
    assert "its mask depends on the text (attn_mask)" in str(seen)


def _read_changed(change: Callable[..., dict[str, Any]]) -> Any:
    """A Llama's score where the arguments of its second layer's attention are changed."""
    model = model_of("Llama")
    layer = model.model.layers[1].self_attn
    before = layer.forward
    layer.forward = lambda **given: before(**{**given, **change(**given)})
    try:
        seen = score_of(model, tokens=24)
    finally:
        del layer.forward
    assert seen.layers[0].verified
    assert not seen.verified
    assert seen.layers[1].mask_note is None
    return seen.layers[1]


def test_a_layer_without_a_name_says_what_is_missing() -> None:
    def turned(position_embeddings: Any, **_: Any) -> dict[str, Any]:
        cos, sin = position_embeddings
        return {"position_embeddings": (cos * 0.5 + 0.5, sin)}

    found = _read_changed(turned)
    assert found.spec is None
    assert "layer 1 (LlamaAttention)" in found.lacks


def _tilted(mask: Tensor) -> Tensor:
    return mask - torch.arange(mask.shape[-1])


def _rounded(mask: Tensor) -> Tensor:
    """Tilted, with other rounding in each text."""
    return _tilted(mask) * (1 + 1e-7 * torch.arange(len(mask))[:, None, None, None])


def _holed(mask: Tensor) -> Tensor:
    holed = mask.clone()
    holed[:, :, 10:, 2] = torch.finfo(mask.dtype).min
    return holed


def _by_head(mask: Tensor) -> Tensor:
    heads = _holed(mask).repeat(1, 4, 1, 1)
    heads[:, :2] = mask
    return heads


@pytest.mark.parametrize("change", [_tilted, _rounded, _by_head, _holed])
def test_masks_that_every_text_has_are_no_operands(change: Callable[[Tensor], Tensor]) -> None:
    """A bias by position, or a pattern of heads, is a part of the score: it is not passed over."""
    found = _read_changed(lambda attention_mask, **_: {"attention_mask": change(attention_mask)})
    assert "its attention differs from that of Baseline" in found.lacks


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["Qwen3", "Gemma2"])
def test_a_model_in_half_precision_is_read_as_in_float32_and_left_as_it_was(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    model_of(family).save_pretrained(tmp_path)
    model = tiny.AUTO.from_pretrained(tmp_path, dtype=dtype, attn_implementation="eager")
    before = logits(model, tokens())
    seen, exact = (
        score_of(model),
        score_of(tiny.AUTO.from_pretrained(tmp_path, dtype=torch.float32)),
    )
    assert seen.verified, str(seen)
    assert [layer.spec for layer in seen.layers] == [layer.spec for layer in exact.layers]
    assert torch.equal(logits(model, tokens()), before)
    assert "eager" not in ALL_ATTENTION_FUNCTIONS


def test_the_command_names_layers(tmp_path: Path, command: Command) -> None:
    configuration("Qwen3").save_pretrained(tmp_path)
    out = command("score", tmp_path, "--tokens", 16).out
    assert "qwen3, 2 attention layers" in out
    assert "layer 0-1: QKRMSNorm (verified on 16 tokens" in out
    record = json.loads(command("score", tmp_path / "config.json", "--json", "--tokens", 16).out)
    assert record["verified"]
    assert [each["score"] for each in record["layers"]] == ["QKRMSNorm"] * 2
    tiny.configuration("bitnet").save_pretrained(tmp_path)
    said = command("score", tmp_path, "--tokens", 16)
    assert said.code == 1
    assert "its output is changed before the last projection" in said.out


@pytest.mark.parametrize(
    ("kind", "score"),
    [
        ("deepseek_v3", "Baseline-PartialRoPE(layout=interleaved,fraction=0.3334,side=last)"),
        ("doge", "QKRMSNorm"),
        ("gemma3n_text", "QKRMSNorm(scale=1)-SlidingWindow(window=512)"),
    ],
)
def test_the_command_reads_sizes_as_released(
    kind: str, score: str, tmp_path: Path, command: Command
) -> None:
    """Groups of experts, sizes by layer, ratios of widths and ranks survive in the small model."""
    make: Any = transformers.CONFIG_MAPPING[kind]
    few: dict[str, Any] = {"num_hidden_layers": 2}
    if kind == "gemma3n_text":
        few |= {"layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 0}
        by_layer = ("intermediate_size", "activation_sparsity_pattern")
        few |= {name: getattr(make(), name)[:2] for name in by_layer}
    make(**few).save_pretrained(tmp_path)
    said = command("score", tmp_path, "--tokens", 16)
    assert f": {score} (verified on 16 tokens" in said.out


STRANGE = '{"model_type": "llama", "rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}'
BAD: dict[str, tuple[str | None, str]] = {
    "nothing": (None, "holds no config.json of transformers"),
    "unknown kind": (
        '{"model_type": "no_such_kind"}',
        "has model type `no_such_kind` but Transformers does not recognize this architecture",
    ),
    "no attention": (
        '{"model_type": "mamba"}',
        "of a mamba model names no number of attention heads (num_attention_heads is None)",
    ),
    "unknown positions": (STRANGE, "KeyError: 'spiral'"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case: str, tmp_path: Path, command: Command) -> None:
    content, why = BAD[case]
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    said = command("score", tmp_path, "--tokens", 16)
    assert said.out == ""
    assert why in said.last
