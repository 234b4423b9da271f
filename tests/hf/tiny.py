"""A tiny random model of every causal family of transformers, from its default configuration alone.

The sizes of the default configuration are shrunk by the names of its fields; what the fields of one
family must agree on beyond that stands in `PARTICULAR`.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from normattn.hf.plan import has_rotary_module

# Half typed by transformers: taken as Any.
AUTO: Any = AutoModelForCausalLM
LENGTH, VOCABULARY = 16, 64
# The first pattern that the whole name of a field matches gives its value.
SIZES: tuple[tuple[str, Any], ...] = (
    (r"(.*_)?vocab(_size.*)?|encoder_hash_byte_group_vocab|ngram_vocab_size_base", VOCABULARY),
    (r"(backbone_|router_)?hidden_size(_global)?|n_embd|d_model|.*emb(edding)?_dim|lru_width", 64),
    (r"dim_model_base|ple_embed_dim|hc_lowrank|out_hidden_size|.*ffn.*(size|dim)|n_inner", 32),
    (r".*intermediate_size.*|shared_expert_size|mlp_dim|dff|dim_ff", 32),
    (r"(swa_)?num_(key_value|kv|query)_(heads|groups)|linear_num_(key|query)_heads", 2),
    (r"index_n_heads|num_mem_blocks|heads_per_ngram", 2),
    (r"(.*_)?(num|n)_(attention_|value_|mamba_)?heads?|.*_(num|n)_heads|n_mamba_heads", 4),
    (r"(decoder_|encoder_)?attention_heads|mamba_num_heads", 4),
    (r".*_rank|(ssm_)?state_size|mamba_d_state", 16),
    (r"(.*_)?head_dim|kv_channels|d_kv|rotary_dim|d_head|attention_head_size|d_rel", 16),
    (r"mamba_d_head|mamba_headdim|mamba_head_dim", 32),
    (r"hidden_size_per_layer_input|(mamba_)?chunk_size", 8),
    (r"(n_routed_|num_|num_local_|moe_num_|n_)experts|zero_expert_num", 4),
    (r"num_experts_per_tok(en)?|moe_top_?k|top_k_experts|top_k|moe_k", 2),
    (r"topk_group|n_group|num_expert_group|n_groups|mamba_n_groups|mamba_ngroups|o_groups", 1),
    (r"(n|num|moe_num)_shared_experts|upsample_groups", 1),
    (r"first_k_dense_replace|num_dense_layers|moe_layer_start_index", 1),
    (r"num_nextn_predict_layers|num_mtp_layers", 0),
    (r"(model_)?max_(position_embeddings|length|seq_len|sequence_length)", LENGTH),
    (r"n_positions|n_ctx|seq_length|original_max_position_embeddings|max_target_positions", LENGTH),
    (r"sliding_window(_size)?|window_size|local_attention.*|attention_chunk_size|floor_scale", 6),
    (r"index_topk|index_topk_blocks|index_block_size", 4),
    (r"query_pre_attn_scalar", 12),
    (r"pad_token_id|image_token_id|video_token_id|audio_token_id", 0),
    (r"(bos|decoder_start|sep|cls)_token_id", 1),
    (r"eos_token_id", None),
)
LAYERS = re.compile(
    r"num_(hidden_)?layers|n_layers?|(num_)?(encoder|decoder)_layers|depth|num_blocks"
)
# Lists by layer whose differences are no other attention.
ALIKE = ("intermediate_size", "activation_sparsity_pattern", "mlp_layer_types", "moe_layers")
# How the layers of these families differ is not told by a list in their configuration.
_THETA = {"head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
_GEMMA4 = {"global_head_dim": 32}
_QWEN4 = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16}
_QWEN4 |= {"indexer_budget": 4, "indexer_compress_ratio": 2}
_DOTS3 = {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_q_lora_rank": 16}
_DOTS3 |= {"swa_kv_lora_rank": 16, "swa_head_dim": 32, "swa_qk_nope_head_dim": 16}
_DOTS3 |= {"swa_v_head_dim": 16, "head_dim": 32}
PARTICULAR: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            f"{kind}_attention": {"rope_type": "default", "rope_theta": theta}
            for kind, theta in (("sliding", 10000.0), ("full", 50000.0))
        },
    },
    "codegen": {"n_head": 4, "rotary_dim": 8, "n_positions": 64, "n_ctx": 64},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"moe_num_experts": 4, "moe_top_k": 2, "ffn_hidden_size": 32},
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "dots3_note": {
        "text_config": _DOTS3,
        "vision_config": {"adapter_in_dim": 64, "adapter_out_dim": 64},
        "audio_config": {"adapter_input_size": 64, "adapter_out_dim": 64},
    },
    "dots3_note_text": _DOTS3,
    "falcon_h1": {"mamba_d_ssm": 128},
    **{name: {"text_config": _GEMMA4} for name in ("gemma4", "gemma4_unified")},
    **dict.fromkeys(("gemma4_text", "gemma4_unified_text"), _GEMMA4),
    "gptj": {"n_positions": 64},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "position_embedding_type": "rope"},
    "hunyuan_v1_dense": _THETA,
    "hunyuan_v1_moe": _THETA,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"qk_head_dim": None},
    "mimo_v2_flash": {"head_dim": 24},
    "ministral": _THETA | {"layer_types": ["full_attention", "sliding_attention"]},
    "mistral": {"sliding_window": None},
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp": {"text_config": _QWEN4},
    "qwen4_exp_text": _QWEN4,
    "recurrent_gemma": {"num_hidden_layers": 3},
    "roformer": {"is_decoder": True, "max_position_embeddings": 64},
    "zamba2": {"use_mem_rope": True},
    "zaya": {"num_experts_per_tok": 1},
}


# Drafts of another model's next tokens, models of two parts with a package or with codes of sound,
# and those whose default configuration is refused by their own code.
NOT_ALONE = {
    *("gemma3n", "gemma4_assistant", "gemma4_unified_assistant"),
    *("musicgen", "musicgen_melody", "gpt_neo", "mamba2", "reformer", "zamba", "xmod"),
}


def rotary_families() -> list[str]:
    """Those whose tiny model holds rotary tables or frequencies; not those that cannot be built."""
    found = []
    for family in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - NOT_ALONE):
        with torch.device("meta"):
            model = AUTO.from_config(configuration(family))
        if not model.config.is_encoder_decoder and has_rotary_module(model):
            found.append(family)
    return found


def configuration(family: str, **more: Any) -> Any:
    """The family's default configuration, shrunk."""
    given = shrunk(CONFIG_MAPPING[family])
    for name, value in (PARTICULAR.get(family, {}) | more).items():
        inner = given.get(name)
        given[name] = inner | value if isinstance(inner, dict) and "config" in name else value
    return CONFIG_MAPPING[family](**given)


def shrunk(kind: Any) -> dict[str, Any]:
    """The fields of a small configuration of this class."""
    whole = kind()
    values = whole.__dict__
    count = next((v for k, v in values.items() if LAYERS.fullmatch(k)), 0)
    by_layer = {k: v for k, v in values.items() if isinstance(v, list | tuple) and len(v) == count}
    types: list[Any] = [*zip(*(v for k, v in by_layer.items() if k not in ALIKE), strict=True)]
    picked = _picked(types or [None] * count, bool(values.get("num_kv_shared_layers")))
    found: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        value = values.get(whole.attribute_map.get(field.name, field.name))
        if hasattr(value, "to_dict"):
            found[field.name] = shrunk(type(value))
        elif LAYERS.fullmatch(field.name) and value is not None:
            found[field.name] = len(picked)
        elif isinstance(value, list | tuple) and value and len(value) == count:
            found[field.name] = [_size(field.name, value[i]) for i in picked]
        elif field.name.endswith("token_id") or (
            isinstance(value, int | list) and not isinstance(value, bool)
        ):
            size = _size(field.name, value)
            if size is not value:
                found[field.name] = size
    if values.get("num_key_value_heads") == values.get("num_attention_heads", 0):
        found["num_key_value_heads"] = 4
    if values.get("num_kv_shared_layers"):
        found["num_kv_shared_layers"] = 2
    return found


def _picked(types: list[Any], shared: bool) -> list[int]:
    """The first layer of each type, two at least; twice over where the upper ones share keys."""
    firsts = sorted({kind: types.index(kind) for kind in types}.values())
    firsts = firsts if len(firsts) > 1 else [0, 1]
    return firsts * 2 if shared else firsts


def _size(name: str, value: Any) -> Any:
    if isinstance(value, str | bool):
        return value
    return next((small for pattern, small in SIZES if re.fullmatch(pattern, name)), value)


def build(family: str, **more: Any) -> Any:
    """The family's tiny model."""
    return build_of(configuration(family, **more))


def build_of(config: Any, auto: Any = AUTO) -> Any:
    """A model whose attention is far from even, so that a wrong position shows."""
    torch.manual_seed(7)
    model = auto.from_config(config).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() >= 2:
                weight.normal_(0, 0.3, generator=generator)
            elif "norm" in name:
                weight.add_(torch.empty_like(weight).uniform_(-0.2, 0.2, generator=generator))
            elif "A_log" not in name and "dt_bias" not in name:
                weight.normal_(0, 0.1, generator=generator)
    return model
