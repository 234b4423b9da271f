"""A model's name is its score: `attention` against the layers of transformers' own tiny models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from normattn import InputError, Score, ScoreSpec, attention
from normattn.score.parts import Slot
from normattn.score.recipes import RECIPES

HEADS, GROUPS, D, TOKENS, VOCABULARY = 4, 2, 16, 40, 64
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "head_dim": D,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "attn_implementation": "eager",
}
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
        more = {
            "rope_parameters": _rope(spec),
            "sliding_window": spec.window[0],
            "hidden_size": 64,
        }
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


def _model(family: str, config: Any) -> Any:
    torch.manual_seed(7)
    name = family.removesuffix("Text") if family == "Gemma3Text" else family
    cls = "Llama4ForCausalLM" if family == "Llama4Text" else f"{name}ForCausalLM"
    model = getattr(transformers, cls)(config).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() >= 2:
                weight.normal_(0, 0.3, generator=generator)
            else:
                weight.add_(torch.randn(weight.shape, generator=generator) * 0.2)
    return model


@contextmanager
def _recorded(model: Any) -> Iterator[dict[int, dict[str, Tensor]]]:
    """What goes into each layer's attention, and what reaches its output projection."""
    seen: dict[int, dict[str, Tensor]] = {}
    handles = []
    for module in model.modules():
        if not hasattr(module, "o_proj"):
            continue
        own = seen.setdefault(module.layer_idx, {"module": module})

        def before(_: nn.Module, given: Any, named: Any, own: Any = own) -> None:
            own["x"] = given[0] if given else named["hidden_states"]

        def out(_: nn.Module, given: Any, own: Any = own) -> None:
            own["o"] = given[0]

        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(module.o_proj.register_forward_pre_hook(out))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _gain(norm: Any) -> Tensor:
    """What a norm multiplies its normalised input with: read off by what it does to ones."""
    eps = float(getattr(norm, "eps", getattr(norm, "variance_epsilon", 0.0)))
    gain: Tensor = norm(torch.ones(norm.weight.shape)) * (1 + eps) ** 0.5
    return gain


def _ours(spec: ScoreSpec, module: Any, x: Tensor) -> Tensor:
    """The layer's attention up to its output projection, by `attention`."""
    gate = None
    if spec.gate is not None:
        halves = module.q_proj(x).unflatten(-1, (-1, 2 * D)).chunk(2, -1)
        gate = halves[1].flatten(2)
    q, k, v = _bare(module, x)
    score = Score(spec, HEADS, q.shape[-1], k.shape[1])
    with torch.no_grad():
        for own, theirs in ((score.query_norm, "q_norm"), (score.key_norm, "k_norm")):
            if own is not None and hasattr(module, theirs):
                weight: Any = own.weight
                weight.copy_(_gain(getattr(module, theirs)).view_as(weight))
        if score.sink is not None:
            score.sink.copy_(module.sinks)
    o: Tensor = attention(q, k, v, score, gate=gate).transpose(1, 2).flatten(2)
    return o


@pytest.mark.parametrize("size", ["small", "as released"])
@pytest.mark.parametrize("name", sorted(RECIPES))
@torch.no_grad()
def test_the_recipe_is_what_the_layers_compute(name: str, size: str) -> None:
    spec = ScoreSpec.parse(_small(name) if size == "small" else name)
    family, more, layers = _configuration(name, spec)
    kept = {key: value for key, value in SIZES.items() if key != "head_dim" or family != "Olmo2"}
    config = getattr(transformers, f"{family}Config")(
        **{**kept, "num_hidden_layers": layers, **more}
    )
    model = _model(family, config)
    ids = torch.randint(2, VOCABULARY, (2, TOKENS), generator=torch.Generator().manual_seed(0))
    with _recorded(model) as seen:
        model(ids, use_cache=False)
    assert len(seen) == (1 if name == "Qwen3-Next" else layers)
    for index, own in seen.items():
        ours = _ours(spec.layer(index, layers), own["module"], own["x"])
        torch.testing.assert_close(ours, own["o"], rtol=1e-5, atol=1e-5)
        # A recipe that is another one is not that of the layer.
        wrong = ScoreSpec.parse("KNA-RoPE(base=77)")
        q, k, v = _bare(own["module"], own["x"])
        plain = attention(q, k, v, wrong).transpose(1, 2).flatten(2)
        assert (plain - own["o"]).abs().max() > 1e-2


def _bare(module: Any, x: Tensor) -> list[Tensor]:
    """Queries, keys and values as the projections make them, (B, H, T, D)."""
    if hasattr(module, "kv_b_proj"):
        return _of_latents(module, x)
    q = module.q_proj(x).unflatten(-1, (HEADS, -1))[..., :D].flatten(2)
    return [
        each.unflatten(-1, (-1, D)).transpose(1, 2)
        for each in (q, module.k_proj(x), module.v_proj(x))
    ]


def _of_latents(module: Any, x: Tensor) -> list[Tensor]:
    """Keys are those of each head and, behind them, the ones that all heads share."""
    q = module.q_b_proj(module.q_a_layernorm(module.q_a_proj(x))).unflatten(-1, (HEADS, -1))
    latent, shared = module.kv_a_proj_with_mqa(x).split([module.kv_lora_rank, D], -1)
    own = module.kv_b_proj(module.kv_a_layernorm(latent)).unflatten(-1, (HEADS, -1))
    k = torch.cat((own[..., :-D], shared[:, :, None].expand(-1, -1, HEADS, -1)), -1)
    return [each.transpose(1, 2) for each in (q, k, own[..., -D:])]


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
