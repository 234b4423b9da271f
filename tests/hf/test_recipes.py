"""A model's name is its score: recipes against the layers of transformers' own tiny models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import transformers

from normattn import InputError, ScoreSpec, score_of
from normattn.score.parts import Slot
from normattn.score.recipes import RECIPES

from .tiny import build_of

HEADS, GROUPS, D, TOKENS, VOCABULARY = 4, 2, 16, 40, 64
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 32,
    "head_dim": D,
}
SIZES |= {"num_attention_heads": HEADS, "num_key_value_heads": GROUPS}
SIZES |= {"max_position_embeddings": 64, "attn_implementation": "eager"}
SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_experts": 4}


def _rope(spec: ScoreSpec, kind: str = "default", **more: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": spec.position.base, **more}  # type: ignore[attr-defined]


def _yarn(spec: ScoreSpec, **more: Any) -> dict[str, Any]:
    return _rope(
        spec,
        "yarn",
        factor=spec.rope_scaling.factor,  # type: ignore[union-attr]
        original_max_position_embeddings=spec.train_length,
        **more,
    )


def _gemma_3(spec: ScoreSpec) -> dict[str, Any]:
    layout: Any = spec.layout
    full = {"rope_type": "linear", "rope_theta": layout.base, "factor": layout.stretch}
    return {
        "sliding_window": layout.window,
        "query_pre_attn_scalar": D,
        "rope_parameters": {"sliding_attention": _rope(spec), "full_attention": full},
    }


def _llama_4(spec: ScoreSpec) -> dict[str, Any]:
    layout: Any = spec.layout
    return {
        "rope_parameters": _rope(spec),
        "floor_scale": layout.length,
        "attention_chunk_size": spec.chunk,
        "attn_scale": layout.beta,
        "num_local_experts": 2,
        "intermediate_size_mlp": 32,
    }


def _configuration(name: str, spec: ScoreSpec) -> tuple[str, dict[str, Any], int]:
    """The family in transformers, its configuration beside the sizes, and how many layers."""
    layout: Any = spec.layout
    if name == "Command-R7B":
        more = {"rope_parameters": _rope(spec), "sliding_window": spec.window[0], "hidden_size": 64}
        return "Cohere2", more, 4
    if name == "DeepSeek-V3":
        rope = _yarn(spec, mscale=1.0, mscale_all_dim=1.0)
        sizes: dict[str, Any] = {"qk_nope_head_dim": 32, "qk_rope_head_dim": D, "v_head_dim": D}
        ranks = {"q_lora_rank": 16, "kv_lora_rank": 16, "first_k_dense_replace": 2}
        own: dict[str, Any] = {"num_key_value_heads": HEADS, "rope_interleave": True}
        return "DeepseekV3", {"rope_parameters": rope, **sizes, **ranks, **own}, 2
    if name == "Gemma-2":
        cap = spec.cap.cap  # type: ignore[union-attr]
        own = {"attn_logit_softcapping": cap, "query_pre_attn_scalar": D}
        return "Gemma2", {**own, "sliding_window": layout.window}, 2
    if name == "Gemma-3":
        return "Gemma3Text", _gemma_3(spec), 6
    if name == "gpt-oss":
        rope = _yarn(spec, truncate=False)
        own = {"rope_parameters": rope, "sliding_window": layout.window, "num_local_experts": 4}
        return "GptOss", own, 2
    if name == "Llama-3.1":
        factors = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        length = {"original_max_position_embeddings": spec.train_length}
        return "Llama", {"rope_parameters": _rope(spec, "llama3", **factors, **length)}, 2
    if name == "Llama-4":
        return "Llama4Text", _llama_4(spec), 4
    if name == "Ministral-3":
        own = {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": spec.logn.beta}  # type: ignore[union-attr]
        return "Ministral3", {"rope_parameters": _yarn(spec, **own)}, 2
    if name == "OLMo-2":
        return "Olmo2", {"rope_parameters": _rope(spec), "rms_norm_eps": 1e-6, "hidden_size": 64}, 2
    if name == "Qwen3-Next":
        rope = _rope(spec, partial_rotary_factor=spec.position.fraction)  # type: ignore[attr-defined]
        linear = {f"linear_{each}": 8 for each in ("key_head_dim", "value_head_dim")}
        linear |= {f"linear_num_{each}_heads": 2 for each in ("key", "value")}
        return "Qwen3Next", {"rope_parameters": rope, **linear, **_EXPERTS}, 4
    family = {"Qwen2.5": "Qwen2", "Qwen3": "Qwen3", "SmolLM3": "SmolLM3"}[name]
    own = {"hidden_size": 64} if name in ("Qwen2.5", "SmolLM3") else {}
    return family, {"rope_parameters": _rope(spec), **own}, 4 if name == "SmolLM3" else 2


# So small that windows, steps of temperature and chunks are passed within the tokens.
_SMALL = {
    "window=4096": "window=7",
    "window=1024": "window=7",
    "window=128": "window=7",
    "Temperature(length=16384)": "Temperature(length=9)",
    "@16384": "@9",
    "size=8192": "size=11",
    "-IRoPE": "-IRoPE(length=9)",
    "@8192": "@64",
    "@4096": "@64",
}


def _small(name: str) -> str:
    text = RECIPES[name]
    for large, little in _SMALL.items():
        text = text.replace(large, little)
    return text


@pytest.mark.parametrize(
    ("name", "text"),
    [(name, text) for name in sorted(RECIPES) for text in {RECIPES[name]: 0, _small(name): 0}],
)
def test_the_recipe_is_what_is_read_off_the_layers(name: str, text: str) -> None:
    """As released and small; `attention` with it gives what each layer's own attention gave."""
    spec = ScoreSpec.parse(text)
    family, more, layers = _configuration(name, spec)
    kept = {key: value for key, value in SIZES.items() if key != "head_dim" or family != "Olmo2"}
    config = getattr(transformers, f"{family}Config")(
        **{**kept, "num_hidden_layers": layers, **more}
    )
    read = score_of(build_of(config), TOKENS)
    assert read.verified, str(read)
    assert len(read.layers) == (1 if name == "Qwen3-Next" else layers)
    for layer in read.layers:
        # A norm without a gain is the same before and after a rotation.
        wanted = str(spec.layer(layer.layer, layers)).replace("-RotateFirst", "")
        assert str(layer.spec) == wanted


def test_every_recipe_reads_and_prints_and_takes_a_method() -> None:
    for name, text in RECIPES.items():
        spec = ScoreSpec.parse(name)
        assert spec == ScoreSpec.parse(text) == ScoreSpec.parse(name.lower())
        assert ScoreSpec.parse(str(spec)) == spec
        if spec.train_length is None:
            assert ScoreSpec.parse(f"{name}@512").train_length == 512
    qwen = ScoreSpec.parse("Qwen3", train_length=40960).with_method("YaRN", factor=4)
    assert str(qwen) == "QKRMSNorm-RoPE(base=1000000)-YaRN(factor=4)@40960"
    with pytest.raises(InputError, match=r"gpt-oss.*4096.*512"):
        ScoreSpec.parse("gpt-oss@512")
    gpt = ScoreSpec.parse("gpt-oss")
    assert gpt.rope_scaling is not None
    slots = {part.slot for part in gpt.layer(0, 2).parts}
    assert {Slot.ROPE_SCALING, Slot.WINDOW, Slot.SINK} <= slots
    assert replace(gpt, train_length=512).layer(1, 2).window == (None, 0)
