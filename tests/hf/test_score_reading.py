"""The score of a model's layers, read off them: every recipe's, and what has no name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from normattn import score_of

from .families import model_of
from .test_recipes import SIZES
from .tiny import build, build_of


def test_a_layer_without_a_name_says_what_is_missing() -> None:
    model = model_of("Llama")
    layer = model.model.layers[1].self_attn
    handle = layer.q_proj.register_forward_hook(lambda _, given, made: made.sin())
    try:
        found = score_of(model, tokens=24)
    finally:
        handle.remove()
    assert found.layers[0].verified
    assert found.layers[1].spec is not None or found.layers[1].lacks is not None
    before = layer.scaling
    try:
        layer.scaling = before * 1.5
        assert "scale=" in str(score_of(model, tokens=24).layers[1].spec)
    finally:
        layer.scaling = before
    turned = layer.forward

    def strange(hidden_states: Any, position_embeddings: Any, **more: Any) -> Any:
        cos, sin = position_embeddings
        return turned(hidden_states, position_embeddings=(cos * 0.5 + 0.5, sin), **more)

    layer.forward = strange
    try:
        found = score_of(model, tokens=24)
    finally:
        del layer.forward
    assert found.layers[0].verified
    assert not found.verified
    assert found.layers[1].spec is None
    assert found.layers[1].lacks is not None
    assert "layer 1 (LlamaAttention)" in found.layers[1].lacks


def test_reading_changes_nothing() -> None:
    model = model_of("Gemma3")
    ids = torch.arange(2, 22)[None]
    with torch.no_grad():
        before = model(ids).logits
        score_of(model, tokens=24)
        assert torch.equal(model(ids).logits, before)


def _latent(**more: Any) -> Any:
    """A tiny DeepSeek-V3, whose keys are made of latent vectors and whose last features turn."""
    sizes = {key: value for key, value in SIZES.items() if key != "head_dim"}
    own = {"qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12}
    own |= {"q_lora_rank": 16, "kv_lora_rank": 16, "first_k_dense_replace": 2}
    own |= {"num_hidden_layers": 2, "num_key_value_heads": 4}
    config = transformers.DeepseekV3Config(**{**sizes, **own, **more})
    return build_of(config)


def test_keys_of_latent_vectors_are_read() -> None:
    plain = "Baseline-PartialRoPE(layout=interleaved,fraction=0.3334,side=last)"
    assert {str(layer.spec) for layer in score_of(_latent()).layers} == {plain}
    apart = score_of(_latent(rope_interleave=False, q_lora_rank=None))
    assert apart.verified, str(apart)
    assert str(apart.layers[0].spec) == "Baseline-PartialRoPE(fraction=0.3334,side=last)"


@pytest.mark.parametrize("all_dim", [1.0, 0.5])
def test_a_scale_that_goes_with_yarn_is_its_sharpness(all_dim: float) -> None:
    """DeepSeek multiplies the whole score with what others multiply the turned features with."""
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0}
    rope |= {"mscale": all_dim, "mscale_all_dim": all_dim, "original_max_position_embeddings": 64}
    seen = score_of(_latent(rope_parameters=rope))
    assert seen.verified, str(seen)
    yarn = "YaRN(factor=40)" if all_dim == 1 else "YaRN(factor=40,sharpness=0.05)"
    assert str(seen.layers[0].spec).endswith(f"side=last)-{yarn}@64")


def test_gates_of_other_kinds_are_read() -> None:
    """Softplus, and logits behind the queries of each head."""
    assert "-Gate(per=head,act=softplus)" in str(score_of(build("laguna")).layers[0].spec)
    assert "-Gate" in str(score_of(build("axk2")).layers[0].spec)


def test_a_layer_that_runs_several_times_is_read_each_time() -> None:
    seen = score_of(build("hrm_text"))
    assert seen.verified, str(seen)
    assert len(seen.layers) > len({layer.layer for layer in seen.layers})


def test_keys_that_an_indexer_chooses_are_an_operand() -> None:
    seen = score_of(build("deepseek_v32"))
    assert "eager" not in ALL_ATTENTION_FUNCTIONS
    assert seen.verified, str(seen)
    note = "an indexer chooses the keys of each query (attn_mask)"
    assert {layer.mask_note for layer in seen.layers} == {note}
    assert note in str(seen)


def test_an_indexer_that_leaves_no_key_out_is_not_shown() -> None:
    seen = score_of(build("glm_moe_dsa", index_topk=48))
    assert not seen.verified
    assert "its indexer leaves out none of 48 tokens: use more tokens" in str(seen)
    assert {layer.mask_note for layer in seen.layers} == {None}


@pytest.mark.parametrize(
    ("family", "more"), [("doge", {}), ("doge", {"keep_window_size": 6}), ("qwen4_exp_text", {})]
)
def test_masks_by_the_text_are_operands(family: str, more: dict[str, Any]) -> None:
    """Doge adds to the scores of a key by its values, and hides the lowest; Qwen4 hides blocks."""
    seen = score_of(build(family, **more))
    assert seen.verified, str(seen)
    assert "its mask depends on the text (attn_mask)" in {layer.mask_note for layer in seen.layers}


def _tilted(mask: torch.Tensor) -> torch.Tensor:
    return mask - torch.arange(mask.shape[-1])


def _rounded(mask: torch.Tensor) -> torch.Tensor:
    """Tilted, with other rounding in each text."""
    return _tilted(mask) * (1 + 1e-7 * torch.arange(len(mask))[:, None, None, None])


def _by_head(mask: torch.Tensor) -> torch.Tensor:
    heads = _holed(mask).repeat(1, 4, 1, 1)
    heads[:, :2] = mask
    return heads


def _holed(mask: torch.Tensor) -> torch.Tensor:
    holed = mask.clone()
    holed[:, :, 10:, 2] = torch.finfo(mask.dtype).min
    return holed


@pytest.mark.parametrize("change", [_tilted, _rounded, _by_head, _holed])
def test_masks_that_every_text_has_are_no_operands(
    change: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """A bias by position, or a pattern of heads, is a part of the score: it is not passed over."""
    model = model_of("Llama")
    layer = model.model.layers[1].self_attn
    before = layer.forward

    def masked(hidden_states: Any, attention_mask: Any, **more: Any) -> Any:
        return before(hidden_states, attention_mask=change(attention_mask), **more)

    layer.forward = masked
    try:
        seen = score_of(model, tokens=24)
    finally:
        del layer.forward
    assert seen.layers[0].verified
    assert not seen.verified
    assert "its attention differs from that of Baseline" in str(seen.layers[1].lacks)
    assert seen.layers[1].mask_note is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["Qwen3", "Gemma2"])
def test_a_model_in_half_precision_is_read_as_in_float32(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    model_of(family).save_pretrained(tmp_path)
    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_pretrained(tmp_path, dtype=dtype, attn_implementation="eager")
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    seen, exact = score_of(model), score_of(auto.from_pretrained(tmp_path, dtype=torch.float32))
    assert seen.verified, str(seen)
    assert [layer.spec for layer in seen.layers] == [layer.spec for layer in exact.layers]
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    assert all(value.dtype == dtype for value in model.parameters())
