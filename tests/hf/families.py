"""Tiny models of popular families, from those of every family, trained to read eight tokens."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import transformers
from torch import Tensor

from . import tiny

LENGTH, VOCABULARY = 8, tiny.VOCABULARY
_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_key_value_heads": 2}
_SIZES |= {"max_position_embeddings": LENGTH}
_PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
_HALF = {**_PLAIN, "partial_rotary_factor": 0.5}
_TWO = {"sliding_attention": {**_PLAIN, "rope_theta": 100.0}, "full_attention": _PLAIN}
_WINDOW = {"use_sliding_window": True, "sliding_window": 6}
# What a configuration has beside that of every family.
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"head_dim": 8},
    "Mistral": {"head_dim": 8},
    "Qwen2": {**_WINDOW, "layer_types": ["full_attention", "sliding_attention"]},
    "Gemma": {"num_key_value_heads": 1},
    "Gemma2": {
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        "attn_implementation": "eager",
    },
    "Gemma3Text": {"rope_parameters": _TWO},
    "SmolLM3": {"no_rope_layers": [1, 0], "no_rope_layer_interval": 2},
    "Granite": {"attention_multiplier": 0.2},
    "Cohere": {"use_qk_norm": True},
    "Glm4": {"head_dim": 8, "rope_parameters": _HALF},
    "GPTNeoX": {"num_key_value_heads": 4, "rope_parameters": _HALF},
    "GptOss": {"rope_parameters": _PLAIN, "attn_implementation": "eager"},
}


def configuration(family: str, **more: Any) -> Any:
    """The configuration of a tiny model."""
    kind = getattr(transformers, f"{family}Config").model_type
    return tiny.configuration(kind, **{**_SIZES, **FAMILIES.get(family, {}), **more})


def build(family: str, **more: Any) -> Any:
    """A model whose attention is far from even, so that a wrong position shows."""
    return tiny.build_of(configuration(family, **more))


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
    """The logits of one forward, without a cache unless one is given."""
    found: Tensor = model(input_ids=ids, **{"use_cache": False, **more}).logits
    return found
