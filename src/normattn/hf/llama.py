"""Conversion of weights between Llama-shaped models and normattn's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from normattn.errors import InputError
from normattn.hf.extend import extension_of
from normattn.hf.native import refuse_applied, scaling_fields
from normattn.layers.feed_forward import swiglu_hidden
from normattn.models.causal_lm import CausalLM
from normattn.models.config import CausalLMConfig
from normattn.models.utils import on_meta, without_dropout
from normattn.score import ScoreSpec
from normattn.score.parts.rope_scaling import PI, Llama3

_LAYER_WEIGHTS = {
    "mixer.norm.gain": ["input_layernorm.weight"],
    "mixer.sublayer.out.weight": ["self_attn.o_proj.weight"],
    "mixer.sublayer.qkv.weight": [f"self_attn.{letter}_proj.weight" for letter in "qkv"],
    "mixer.sublayer.qkv.bias": [f"self_attn.{letter}_proj.bias" for letter in "qkv"],
    "mixer.sublayer.score.query_norm.weight": ["self_attn.q_norm.weight"],
    "mixer.sublayer.score.key_norm.weight": ["self_attn.k_norm.weight"],
    "feed_forward.norm.gain": ["post_attention_layernorm.weight"],
    "feed_forward.sublayer.up.weight": [f"mlp.{name}_proj.weight" for name in ("gate", "up")],
    "feed_forward.sublayer.down.weight": ["mlp.down_proj.weight"],
}
"""normattn's weights of a layer, each with transformers' weights, concatenated in this order."""
_MODEL_WEIGHTS = {
    "embedding.weight": "model.embed_tokens.weight",
    "final_norm.gain": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
_SETTINGS = {
    "vocab_size": "vocab_size",
    "dim": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "hidden": "intermediate_size",
    "norm_eps": "rms_norm_eps",
    "train_length": "max_position_embeddings",
    "tie_head": "tie_word_embeddings",
}
"""normattn's settings and transformers' names for them."""
_ROPE_TYPES = ("default", "linear", "llama3")
"""The rope types of transformers that normattn has at every length."""
_ROPE_FIELDS = {
    *("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor"),
    *("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
}
"""The fields of these rope types. Others may do more than rotate (Ministral 3's temperature)."""


def from_llama(model: Any) -> CausalLM:
    """Convert a model of Llama's architecture (Llama, Qwen2, Qwen3, …) to an equal `CausalLM`.

    The weights decide, not the class: they must be those of Llama's layers, with or without q, k
    and v biases and per-head q and k norms. The logits of a few tokens must agree. The weights are
    copies, with the same dtype and device. `max_position_embeddings` becomes the training length;
    rope scaling of type `linear` or `llama3` becomes PI or Llama3. Dropout is not converted.

    Raises `InputError` for another architecture or other logits, other rope scaling, sliding
    windows, biases beyond those of q, k and v, and another activation than SiLU.
    """
    config, weights = _to_causal_lm_config(model), model.state_dict()
    converted = {}
    for name, sources in _weight_names(config):
        parts = [weights.pop(source) for source in sources if source in weights]
        if parts:
            converted[name] = torch.cat(parts)
    if config.tie_head:
        converted.pop("head.weight", None)
    with on_meta():
        causal_lm = CausalLM(config)
    expected = {name: value.shape for name, value in causal_lm.state_dict().items()}
    shapes = {name: value.shape for name, value in converted.items()}
    mismatched = weights.keys() | {name for name, _ in expected.items() ^ shapes.items()}
    if mismatched:
        raise InputError(
            f"a {type(model).__name__} cannot become a CausalLM: its weights are not those of "
            f"Llama's layers, which differ by {min(mismatched)}"
        )
    causal_lm.load_state_dict(converted, assign=True)
    weight = model.lm_head.weight
    ids = torch.arange(9, device=weight.device)[None] % config.vocab_size
    with torch.no_grad(), without_dropout(model):
        own = model(input_ids=ids, use_cache=False).logits.double()
        error = (causal_lm.eval()(ids).double() - own).norm()
    tolerance = 1e-3 if weight.dtype in (torch.float32, torch.float64) else 0.2
    if not error <= tolerance * own.norm():  # also where a head of zeros gives no logits
        raise InputError(
            f"a {type(model).__name__} cannot become a CausalLM: it has the weights of Llama's "
            "shape, but computes other logits with them"
        )
    return causal_lm.train(model.training)


def to_llama(model: CausalLM) -> Any:
    """Convert a `CausalLM` to an equal transformers model.

    It is a `LlamaForCausalLM`, a `Qwen2ForCausalLM` if q, k and v have biases, or a
    `Qwen3ForCausalLM` if the score is QKRMSNorm. The weights are copies. PI and Llama3 from
    training are converted, dropout and an active method are not. Raises `InputError` for settings
    that none of the three supports, and without transformers.
    """
    try:
        import transformers
    except ImportError:
        raise InputError("to_llama needs transformers: pip install normattn[hf]") from None
    if not isinstance(model, CausalLM):
        kind = type(model).__name__
        raise InputError(f"this takes a CausalLM (the .model of a wrapped one), but it is a {kind}")
    config = model.config
    family, llama_config = _to_llama_config(config)
    with on_meta():
        llama = getattr(transformers, f"{family}ForCausalLM")(llama_config)
    weights, converted = model.state_dict(), dict[str, Tensor]()
    kv_heads = config.kv_heads or config.heads
    rows = [count * config.score_head_dim for count in (config.heads, kv_heads, kv_heads)]
    for name, targets in _weight_names(config):
        if (weight := weights.get(name)) is not None:
            sizes = rows if len(targets) == 3 else [weight.shape[0] // len(targets)] * len(targets)
            parts = zip(targets, torch.split(weight, sizes), strict=True)
            converted |= {target: part.clone() for target, part in parts}
    if config.tie_head:
        converted["lm_head.weight"] = converted["model.embed_tokens.weight"]
    llama.load_state_dict(converted, assign=True)
    llama.tie_weights()
    with model.head_weight.device:  # frequencies are not in the state dict, and still on meta
        llama.model.rotary_emb = type(llama.model.rotary_emb)(llama_config)
    return llama.train(model.training)


def _weight_names(config: CausalLMConfig) -> Iterator[tuple[str, list[str]]]:
    """normattn's weight names, each with transformers' names for the same weights."""
    for name, target in _MODEL_WEIGHTS.items():
        yield name, [target]
    for layer in range(config.layers):
        for name, targets in _LAYER_WEIGHTS.items():
            yield f"blocks.{layer}.{name}", [f"model.layers.{layer}.{x}" for x in targets]


def _to_causal_lm_config(model: Any) -> CausalLMConfig:
    kind, extension = type(model).__name__, extension_of(model)
    if extension is not None:
        raise InputError(
            f"this {kind} is extended, by {extension.spec.method}: remove() the extension first"
        )
    config = model.config
    refuse_applied(config)
    weights = model.state_dict()
    normed = "model.layers.0.self_attn.q_norm.weight" in weights
    try:
        rope = config.rope_parameters or {}
        _refuse_settings(config, rope, kind)
        eps = {"eps": config.rms_norm_eps} if normed else {}
        name = "QKRMSNorm-RoPE" if normed else "Baseline-RoPE"
        parts = list(ScoreSpec.parse(name, base=float(rope["rope_theta"]), **eps).parts)
        length = config.max_position_embeddings
        if rope.get("rope_type") == "linear":
            parts.append(PI(factor=float(rope["factor"])))
        elif rope.get("rope_type") == "llama3":
            # normattn counts rotations within the training length, so the ends are scaled.
            ratio = length / rope["original_max_position_embeddings"]
            low, high = (ratio * rope[f"{end}_freq_factor"] for end in ("low", "high"))
            parts.append(Llama3(factor=float(rope["factor"]), low=low, high=high))
        fields: dict[str, Any] = {x: getattr(config, source) for x, source in _SETTINGS.items()}
        return CausalLMConfig(
            **fields,
            head_dim=getattr(config, "head_dim", None),
            qkv_bias="model.layers.0.self_attn.q_proj.bias" in weights,
            score=ScoreSpec(tuple(parts)),
        )
    except (AttributeError, KeyError) as error:
        raise InputError(
            f"a {kind} cannot become a CausalLM: its configuration lacks what causal models of "
            f"Llama's shape have ({error})"
        ) from error


def _refuse_settings(config: Any, rope: dict[str, Any], kind: str) -> None:
    """Raise `InputError` for unsupported settings that the logits of a few tokens may not show."""
    layers = set(getattr(config, "layer_types", None) or ())
    windowed = getattr(config, "sliding_window", None) is not None
    unknown = [key for key, value in rope.items() if value is not None and key not in _ROPE_FIELDS]
    rope_type = rope.get("rope_type", "default")
    reasons = {
        f"rotary positions scaled by {rope_type!r}": rope_type not in _ROPE_TYPES,
        f"the setting {', '.join(unknown)} of rotary positions, which ours have not": unknown,
        "layers with a sliding window": layers - {"full_attention"} or (windowed and not layers),
    }
    for reason, unsupported in reasons.items():
        if unsupported:
            raise InputError(f"this {kind} cannot become a CausalLM, because it has {reason}")


def _to_llama_config(config: CausalLMConfig) -> tuple[str, Any]:
    import transformers

    spec, normed = config.score, config.score.variant.name == "QKRMSNorm"
    required = {"block": "mha", "placement": "PreLN", "norm": "rms", "norm_gain": True}
    for field, value in (required | {"feed_forward": "swiglu", "shared_layers": False}).items():
        if getattr(config, field) != value:
            raise InputError(
                f"{field} {getattr(config, field)!r} has no counterpart in Llama, Qwen2 or Qwen3, "
                f"whose models have {value!r}"
            )
    base, length = float(getattr(spec.position, "base", 10000.0)), config.train_length
    baseline = ScoreSpec.parse("Baseline-RoPE", length, base=base)
    rms = ScoreSpec.parse("QKRMSNorm-RoPE", length, base=base, eps=config.norm_eps)
    unscaled = tuple(part for part in spec.parts if part is not spec.rope_scaling)
    if ScoreSpec(unscaled, spec.train_length) not in (baseline, rms):
        raise InputError(
            f"the score {spec} has no counterpart in Llama, Qwen2 or Qwen3: those have {baseline}, "
            f"or {rms} with the norms' own eps"
        )
    if config.qkv_bias and normed:
        raise InputError("qkv_bias with QKRMSNorm has no counterpart: Qwen3 biases the output too")
    scaling = spec.rope_scaling
    rope = {"rope_type": "default", "rope_theta": base}
    if isinstance(scaling, PI | Llama3):
        rope |= scaling_fields(scaling, length)
    elif scaling is not None:
        raise InputError(f"the spectrum {scaling.name} has no counterpart in Llama, Qwen2 or Qwen3")
    family = "Qwen3" if normed else "Qwen2" if config.qkv_bias else "Llama"
    fields = {target: getattr(config, name) for name, target in _SETTINGS.items()}
    fields |= {
        "head_dim": config.score_head_dim,
        "num_key_value_heads": config.kv_heads or config.heads,
        "intermediate_size": config.hidden or swiglu_hidden(config.dim),
    }
    fields |= {"bos_token_id": None, "eos_token_id": None, "rope_parameters": rope}
    return family, getattr(transformers, f"{family}Config")(**fields)
