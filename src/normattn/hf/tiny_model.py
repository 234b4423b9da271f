"""A small random model of a configuration: the same layers, heads narrow in number, not in size."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import torch

from normattn.errors import InputError
from normattn.hf.config_values import refuse_odd_values
from normattn.hf.load import _explained, _options, _source, refuse_kind, refuse_sizes
from normattn.io import expanded

_VOCABULARY = 64
_RANK = 16
"""What the smallest rank of latent vectors becomes, or a multiple of it."""
_LITTLE = {
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "intermediate_size_mlp": 32,
    "ffn_hidden_size": 32,
    "num_experts": 2,
    "num_local_experts": 2,
    "n_routed_experts": 2,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "num_expert_group": 1,
    "index_topk": 8,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
    "keep_window_size": 8,
    "vocab_size": _VOCABULARY,
    "vocab_size_per_layer_input": _VOCABULARY,
}
_MOST = {"num_hidden_layers": 1000, "head_dim": 4096, "max_position_embeddings": 1 << 31}
"""What no model exceeds: beyond it a configuration would take memory without end."""
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}


def read_configuration(model: str | Path) -> Any:
    """The configuration of a folder, a GGUF file, a config.json or a name on the hub.

    Raises `InputError` for what holds none, for a kind that transformers does not know, and for
    weights beside it that are damaged or not those of the configuration.
    """
    try:
        from transformers import AutoConfig
    except ImportError:
        raise InputError("reading a model needs transformers: pip install normattn[hf]") from None
    path = expanded(model)
    if path.is_file() and path.suffix == ".json":
        refuse_kind(path)
        with _explained(str(path)):
            return AutoConfig.from_pretrained(str(path), trust_remote_code=False)
    source, gguf = _source(model, None)
    with _explained(gguf or source):
        config = AutoConfig.from_pretrained(source, **_options(source, gguf))
    if gguf is not None or any(Path(source).glob("*.safetensors*")):
        refuse_sizes(source, gguf, config)
    return config


def small_model(config: Any) -> Any:
    """A random causal language model of this configuration with two heads, narrow elsewhere.

    Layers, their kinds, the size of a head and all about positions are as configured; where layers
    choose among keys they keep few, so that a short text shows it. Weights are large enough for
    attention to be far from even. Raises `InputError` where transformers cannot build it, and for
    sizes beyond those of any model.
    """
    import transformers

    config = copy.deepcopy(config)
    text = config.get_text_config()
    if not hasattr(text, "model_type"):
        raise InputError(f"the text model of a {config.model_type} configuration is {text!r}")
    refuse_odd_values(text.to_dict(), f"the configuration of a {text.model_type} model")
    subject = f"a small {text.model_type} model"
    with _explained(subject):
        _make_small(text)
    text._attn_implementation = "eager"
    auto: Any = transformers.AutoModelForCausalLM
    with _explained(subject):
        torch.manual_seed(0)
        model = auto.from_config(text, attn_implementation="eager").float().eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            width = weight.shape[-1] if weight.dim() > 1 else 1
            weight.copy_(noise / width**0.5 if weight.dim() > 1 else weight + 0.2 * noise)
    return model


def in_float64(model: Any) -> Any:
    """The model in float64 where its family computes in it, so that rounding differs less."""
    try:
        with torch.no_grad():
            model.double()(torch.tensor([[2, 3]]), use_cache=False)
    except (RuntimeError, TypeError, ValueError, AttributeError, KeyError):
        return model.float()
    return model


def _make_small(text: Any) -> None:
    """Set the sizes of a text configuration to those of the small model."""
    heads = getattr(text, "num_attention_heads", None)
    if not isinstance(heads, int) or heads < 1:
        raise InputError(
            f"the configuration of a {text.model_type} model names no number of attention heads "
            f"(num_attention_heads is {heads!r}), so there is no score to read"
        )
    groups = int(getattr(text, "num_key_value_heads", None) or heads)
    head_dim = _configured(text, "head_dim") or text.hidden_size // heads
    for name, most in _MOST.items():
        size = head_dim if name == "head_dim" else getattr(text, name, None)
        if isinstance(size, int | float) and not 0 < size <= most:
            raise InputError(f"{name}={size:,} is no size of a {text.model_type} model")
    sizes = {
        **{name: _little(getattr(text, name), size) for name, size in _few(text)},
        **{name: value for name, value in _TOKENS.items() if hasattr(text, name)},
        "num_attention_heads": 2,
        "hidden_size": 2 * int(head_dim),
    }
    sizes.update(_narrowed(text))
    if hasattr(text, "num_key_value_heads"):
        sizes["num_key_value_heads"] = 2 if groups == heads else 1
    for name, value in sizes.items():
        setattr(text, name, value)


def _configured(text: Any, name: str) -> Any:
    """The value of a field, or the one of all layers where some have one of their own."""
    try:
        return getattr(text, name, None)
    except RuntimeError:  # transformers refuses to say it for the whole
        return text.__dict__.get(name)


def _narrowed(text: Any) -> dict[str, int]:
    """The width and the ranks of latent vectors with their ratios kept: some scale by those."""
    names = ("hidden_size", "q_lora_rank", "kv_lora_rank")
    ranks = {name: getattr(text, name, None) for name in names}
    whole = {name: size for name, size in ranks.items() if isinstance(size, int) and size > 0}
    common = math.gcd(*whole.values())
    if len(whole) < 2 or common < 2 * _RANK or common % _RANK:
        return {}
    return {name: size // (common // _RANK) for name, size in whole.items()}


def _few(text: Any) -> list[tuple[str, int]]:
    """The sizes that this configuration has."""
    return [(name, size) for name, size in _LITTLE.items() if hasattr(text, name)]


def _little(configured: Any, size: int) -> Any:
    """The size, not above what is configured; of every layer where each has its own."""
    if isinstance(configured, list):
        return [_little(one, size) for one in configured]
    return min(configured, size) if isinstance(configured, int) else size
