"""Tiny random models of every family, made from a configuration alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import transformers
from torch import Tensor

LENGTH, VOCABULARY = 8, 64
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": LENGTH,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_SLIDING_THEN_FULL = {
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention"],
    "head_dim": 8,
}
# The name in transformers, and what its configuration has beside the sizes.
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"num_key_value_heads": 2},
    "Mistral": {"num_key_value_heads": 2, "sliding_window": None},
    "Qwen2": {
        "num_key_value_heads": 2,
        "use_sliding_window": True,
        "sliding_window": 6,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "Qwen3": {"num_key_value_heads": 2, "head_dim": 16},
    "Gemma": {"num_key_value_heads": 1, "head_dim": 8},
    "Gemma2": {
        **_SLIDING_THEN_FULL,
        "num_key_value_heads": 2,
        "query_pre_attn_scalar": 12,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        "attn_implementation": "eager",
    },
    "Gemma3": {
        **_SLIDING_THEN_FULL,
        "num_key_value_heads": 2,
        "query_pre_attn_scalar": 12,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "SmolLM3": {"num_key_value_heads": 2, "no_rope_layers": [1, 0], "no_rope_layer_interval": 2},
    "Olmo2": {"num_key_value_heads": 2},
    "Granite": {"num_key_value_heads": 2, "attention_multiplier": 0.2},
    "Cohere": {"num_key_value_heads": 2, "use_qk_norm": True},
    "Glm4": {
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
    },
    "GPTNeoX": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
    },
    "GptOss": {
        **_SLIDING_THEN_FULL,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "attn_implementation": "eager",
    },
}


def configuration(family: str, **more: Any) -> Any:
    """The configuration of a tiny model."""
    name = {"Gemma3": "Gemma3Text"}.get(family, family)
    make: Callable[..., Any] = getattr(transformers, f"{name}Config")
    return make(**{**_SIZES, **FAMILIES.get(family, {}), **more})


def build(family: str, **more: Any) -> Any:
    """A model whose attention is far from even, so that a wrong position shows."""
    torch.manual_seed(7)
    model = getattr(transformers, f"{family}ForCausalLM")(configuration(family, **more)).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() >= 2:
                weight.normal_(0, 0.3, generator=generator)
            elif "norm" not in name:
                weight.normal_(0, 0.1, generator=generator)
    return model


@lru_cache
def model_of(family: str) -> Any:
    """The family's model, shared by tests: an extension leaves it as it was."""
    return build(family)


def tokens(rows: int = 2, length: int = 3 * LENGTH, seed: int = 0) -> Tensor:
    """Random tokens, none of which is the padding."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCABULARY, (rows, length), generator=generator)


@torch.no_grad()
def logits(model: Any, ids: Tensor, **more: Any) -> Tensor:
    """The logits of one forward."""
    found: Tensor = model(ids, **more).logits
    return found
