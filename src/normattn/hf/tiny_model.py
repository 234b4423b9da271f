"""A small random model of a configuration: the same layers, heads narrow in number, not in size."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import torch

from normattn.errors import InputError
from normattn.hf.gguf import refuse_scaled
from normattn.hf.load import options_of, refuse_endless, refuse_kind, source_of
from normattn.hf.model_parts import explained
from normattn.io import expanded

_RANK = 16
"""What the smallest rank of latent vectors becomes, or a multiple of it."""
_AT_MOST = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 64),
    **dict.fromkeys(("intermediate_size", "intermediate_size_mlp", "ffn_hidden_size"), 32),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("index_topk", "indexer_budget", "keep_window_size"), 8),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 2),
    **dict.fromkeys(("num_experts_per_tok", "indexer_compress_ratio"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group"), 1),
}
"""Fields that become small; of every layer where each has its own."""
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
_ABSURD = {"num_hidden_layers": 1000, "head_dim": 4096, "max_position_embeddings": 1 << 31}
"""What no model exceeds: beyond it a configuration would take memory without end."""


def read_configuration(model: str | Path) -> Any:
    """The configuration of a folder, a GGUF file, a config.json or a name on the hub.

    Raises `InputError` for what holds none, for a kind that transformers does not know, and for a
    GGUF file whose frequencies are scaled.
    """
    try:
        from transformers import AutoConfig
    except ImportError:
        raise InputError("reading a model needs transformers: pip install normattn[hf]") from None
    path = expanded(model)
    if path.is_file() and path.suffix == ".json":
        refuse_kind(path)
        with explained(str(path)):
            return AutoConfig.from_pretrained(str(path), trust_remote_code=False)
    source, gguf = source_of(model)
    if gguf is not None:
        refuse_scaled(Path(source) / gguf)
    with explained(gguf or source):
        return AutoConfig.from_pretrained(source, **options_of(source, gguf))


def small_model(config: Any) -> Any:
    """A random causal language model of this configuration with two heads, narrow elsewhere.

    Layers, their kinds, the size of a head and all about positions are as configured; where layers
    select among keys they keep few, so that a short text shows it. Weights are large enough for
    attention to be far from even. Raises `InputError` where transformers cannot build it, and for
    sizes beyond those of any model.
    """
    import transformers

    config = copy.deepcopy(config)
    text = config.get_text_config()
    if not hasattr(text, "model_type"):
        raise InputError(f"the text model of a {config.model_type} configuration is {text!r}")
    if text.model_type.startswith("normattn"):
        raise InputError(
            "this is normattn's own model in transformers' format, which no method extends there: "
            "use `normattn evaluate RUN --methods …`, or save normattn.hf.to_llama(model)"
        )
    auto: Any = transformers.AutoModelForCausalLM
    with explained(f"a small {text.model_type} model"):
        _make_small(text)
        text._attn_implementation = "eager"
        torch.manual_seed(0)
        model = auto.from_config(text, attn_implementation="eager").float().eval()
    refuse_endless(model, f"a {text.model_type} model")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            one = weight.dim() < 2
            weight.copy_(weight + 0.2 * noise if one else noise / weight.shape[-1] ** 0.5)
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
    try:
        head_dim = getattr(text, "head_dim", None)
    except RuntimeError:  # layers have sizes of their own, and transformers names no one of them
        head_dim = text.__dict__.get("head_dim")
    head_dim = head_dim or text.hidden_size // heads
    for name, most in _ABSURD.items():
        size = head_dim if name == "head_dim" else getattr(text, name, None)
        if isinstance(size, int | float) and not 0 < size <= most:
            raise InputError(f"{name}={size:,} is no size of a {text.model_type} model")
    sizes = {
        name: _little(getattr(text, name), most)
        for name, most in _AT_MOST.items()
        if hasattr(text, name)
    }
    sizes |= {name: value for name, value in _TOKENS.items() if hasattr(text, name)}
    sizes |= {"num_attention_heads": 2, "hidden_size": 2 * int(head_dim)} | _narrowed(text)
    # Mamba layers beside attention, whose heads make up a multiple of the width.
    expand, own_width = getattr(text, "mamba_expand", None), hasattr(text, "mamba_d_ssm")
    if isinstance(expand, int) and hasattr(text, "mamba_n_heads") and not own_width:
        wide = expand * sizes["hidden_size"]
        sizes |= {"mamba_n_heads": 2, "mamba_n_groups": 1, "mamba_d_head": wide // 2}
    if hasattr(text, "num_key_value_heads"):
        sizes["num_key_value_heads"] = 2 if groups == heads else 1
    for name, value in sizes.items():
        setattr(text, name, value)


def _narrowed(text: Any) -> dict[str, int]:
    """The width and the ranks of latent vectors with their ratios kept: some scale by those."""
    names = ("hidden_size", "q_lora_rank", "kv_lora_rank")
    ranks = {name: getattr(text, name, None) for name in names}
    whole = {name: size for name, size in ranks.items() if isinstance(size, int) and size > 0}
    common = math.gcd(*whole.values())
    if len(whole) < 2 or common < 2 * _RANK or common % _RANK:
        return {}
    return {name: size // (common // _RANK) for name, size in whole.items()}


def _little(configured: Any, size: int) -> Any:
    if isinstance(configured, list):
        return [_little(one, size) for one in configured]
    return min(configured, size) if isinstance(configured, int) else size
