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

_LAYER = {
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
"""Our parts of a layer, and theirs, several of which ours holds as one matrix in this order."""
_WHOLE = {
    "embedding.weight": "model.embed_tokens.weight",
    "final_norm.gain": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
_FIELDS = {
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
"""Our settings and theirs of the same meaning."""
_ROPE_TYPES = ("default", "linear", "llama3")
"""Those of transformers that some rope scaling here equals at every length."""
_ROPE_FIELDS = {
    *("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor"),
    *("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
}
"""The settings of these kinds. Others may do more than rotate (Ministral 3's temperature)."""


def from_llama(model: Any) -> CausalLM:
    """A `CausalLM` that computes what a model of Llama's shape computes: Llama, Qwen2, Qwen3, ….

    What counts is the shape, not the name: its weights are those of Llama's layers, with biases of
    q, k and v or with norms of q and k for each head, and its logits of a few tokens are ours. The
    weights are copies, of the same dtype and on the same device; logits agree up to rounding.
    `max_position_embeddings` becomes the training length; rope scaling of the kinds `linear` and
    `llama3` becomes PI or Llama3, trained in. Dropout, which only training sees, is not carried
    over. Raises `InputError` for another shape or other logits, rotary positions scaled in another
    way, sliding windows, biases beyond those of q, k and v, and another activation than SiLU.
    """
    config, theirs = _our_config(model), model.state_dict()
    ours = {}
    for mine, names in _weights(config):
        parts = [theirs.pop(name) for name in names if name in theirs]
        if parts:
            ours[mine] = torch.cat(parts)
    if config.tie_head:
        ours.pop("head.weight", None)
    with on_meta():
        made = CausalLM(config)
    wanted = {name: value.shape for name, value in made.state_dict().items()}
    found = {name: value.shape for name, value in ours.items()}
    odd = {*theirs, *(name for name in wanted | found if found.get(name) != wanted.get(name))}
    if odd:
        raise InputError(
            f"a {type(model).__name__} cannot become a CausalLM: its weights are not those of "
            f"Llama's layers, which differ by {min(odd)}"
        )
    made.load_state_dict(ours, assign=True)
    _refuse_other_logits(model, made.eval())
    return made.train(model.training)


def to_llama(model: CausalLM) -> Any:
    """The transformers model that computes what `model` computes as it was trained.

    A `LlamaForCausalLM`; a `Qwen2ForCausalLM` where q, k and v have biases, a `Qwen3ForCausalLM`
    where the score is QKRMSNorm. The weights are copies; PI and Llama3 are carried over where they
    were trained in, dropout and a method that is switched on are not. Raises `InputError` where
    neither can say what the model's settings say.
    """
    import transformers

    config = model.config
    name, theirs_config = _their_config(config)
    with on_meta():
        made = getattr(transformers, f"{name}ForCausalLM")(theirs_config)
    ours, theirs = model.state_dict(), dict[str, Tensor]()
    kv_heads = config.kv_heads or config.heads
    rows = [count * config.score_head_dim for count in (config.heads, kv_heads, kv_heads)]
    for mine, names in _weights(config):
        if (whole := ours.get(mine)) is not None:
            sizes = rows if len(names) == 3 else [whole.shape[0] // len(names)] * len(names)
            parts = zip(names, torch.split(whole, sizes), strict=True)
            theirs |= {their_name: part.clone() for their_name, part in parts}
    if config.tie_head:
        theirs["lm_head.weight"] = theirs["model.embed_tokens.weight"]
    made.load_state_dict(theirs, assign=True)
    made.tie_weights()
    with model.head_weight.device:  # the frequencies are no weights, and still on the meta device
        made.model.rotary_emb = type(made.model.rotary_emb)(theirs_config)
    return made.train(model.training)


def _weights(config: CausalLMConfig) -> Iterator[tuple[str, list[str]]]:
    """normattn's names, each with transformers' names; several of theirs may be one matrix here."""
    for mine, names in _WHOLE.items():
        yield mine, [names]
    for layer in range(config.layers):
        for mine, parts in _LAYER.items():
            yield f"blocks.{layer}.{mine}", [f"model.layers.{layer}.{name}" for name in parts]


def _our_config(model: Any) -> CausalLMConfig:
    """normattn's configuration for their model; `InputError` for what it cannot express."""
    kind, extension = type(model).__name__, extension_of(model)
    if extension is not None:
        raise InputError(
            f"this {kind} is extended, by {extension.spec.method}: remove() the extension first"
        )
    theirs = model.config
    refuse_applied(theirs)
    weights = model.state_dict()
    normed = "model.layers.0.self_attn.q_norm.weight" in weights
    try:
        rope = theirs.rope_parameters or {}
        _refuse_settings(theirs, rope, kind)
        eps = {"eps": theirs.rms_norm_eps} if normed else {}
        name = "QKRMSNorm-RoPE" if normed else "Baseline-RoPE"
        score = ScoreSpec.parse(name, base=float(rope["rope_theta"]), **eps)
        scaling: PI | Llama3 | None = None
        length = theirs.max_position_embeddings
        if rope.get("rope_type") == "linear":
            scaling = PI(factor=float(rope["factor"]))
        elif rope.get("rope_type") == "llama3":
            # Ours counts turns within the training length: the ends are scaled by the ratio.
            longer = length / rope["original_max_position_embeddings"]
            low, high = (longer * rope[f"{end}_freq_factor"] for end in ("low", "high"))
            scaling = Llama3(factor=float(rope["factor"]), low=low, high=high)
        fields: dict[str, Any] = {ours: getattr(theirs, name) for ours, name in _FIELDS.items()}
        return CausalLMConfig(
            **fields,
            head_dim=getattr(theirs, "head_dim", None),
            qkv_bias="model.layers.0.self_attn.q_proj.bias" in weights,
            score=score if scaling is None else ScoreSpec((*score.parts, scaling)),
        )
    except (AttributeError, KeyError) as error:
        raise InputError(
            f"a {kind} cannot become a CausalLM: its configuration lacks what causal models of "
            f"Llama's shape have ({error})"
        ) from error


def _refuse_settings(theirs: Any, rope: dict[str, Any], kind: str) -> None:
    """Raise `InputError` for settings that a few tokens need not show in the logits."""
    layers = set(getattr(theirs, "layer_types", None) or ())
    windowed = getattr(theirs, "sliding_window", None) is not None
    unknown = [key for key, value in rope.items() if value is not None and key not in _ROPE_FIELDS]
    scaled = rope.get("rope_type", "default")
    reasons = {
        f"rotary positions scaled by {scaled!r}": scaled not in _ROPE_TYPES,
        f"the setting {', '.join(unknown)} of rotary positions, which ours have not": unknown,
        "layers with a sliding window": layers - {"full_attention"} or (windowed and not layers),
    }
    for reason, found in reasons.items():
        if found:
            raise InputError(f"this {kind} cannot become a CausalLM, because it has {reason}")


def _refuse_other_logits(model: Any, made: CausalLM) -> None:
    """Raise `InputError` where a few tokens show that the same weights compute something else."""
    weight = model.lm_head.weight
    ids = torch.arange(9, device=weight.device)[None] % made.config.vocab_size
    with torch.no_grad(), without_dropout(model):
        theirs = model(input_ids=ids, use_cache=False).logits.double()
        ours = made(ids).double()
    close = 1e-3 if weight.dtype in (torch.float32, torch.float64) else 0.2
    if not float((ours - theirs).norm()) <= close * float(theirs.norm()):
        raise InputError(
            f"a {type(model).__name__} cannot become a CausalLM: it has the weights of Llama's "
            "shape, but computes other logits with them"
        )


def _their_config(config: CausalLMConfig) -> tuple[str, Any]:
    """The family and the configuration that say our settings; `InputError` where none does."""
    import transformers

    spec, normed = config.score, config.score.variant.name == "QKRMSNorm"
    wanted = {"block": "mha", "placement": "PreLN", "norm": "rms", "norm_gain": True}
    for field, value in (wanted | {"feed_forward": "swiglu", "shared_layers": False}).items():
        if getattr(config, field) != value:
            raise InputError(
                f"{field} {getattr(config, field)!r} has no counterpart in Llama, Qwen2 or Qwen3, "
                f"whose models have {value!r}"
            )
    base, length = float(getattr(spec.position, "base", 10000.0)), config.train_length
    plain = ScoreSpec.parse("Baseline-RoPE", length, base=base)
    rms = ScoreSpec.parse("QKRMSNorm-RoPE", length, base=base, eps=config.norm_eps)
    bare = tuple(part for part in spec.parts if part is not spec.rope_scaling)
    if ScoreSpec(bare, spec.train_length) not in (plain, rms):
        raise InputError(
            f"the score {spec} has no counterpart in Llama, Qwen2 or Qwen3: those have {plain}, or "
            f"{rms} with the norms' own eps"
        )
    if config.qkv_bias and normed:
        raise InputError("qkv_bias with QKRMSNorm has no counterpart: Qwen3 biases the output too")
    scaling = spec.rope_scaling
    rope = {"rope_type": "default", "rope_theta": base}
    if isinstance(scaling, PI | Llama3):
        rope |= scaling_fields(scaling, length)
    elif scaling is not None:
        raise InputError(f"the spectrum {scaling.name} has no counterpart in Llama, Qwen2 or Qwen3")
    name = "Qwen3" if normed else "Qwen2" if config.qkv_bias else "Llama"
    fields = {theirs: getattr(config, ours) for ours, theirs in _FIELDS.items()}
    fields |= {
        "head_dim": config.score_head_dim,
        "num_key_value_heads": config.kv_heads or config.heads,
        "intermediate_size": config.hidden or swiglu_hidden(config.dim),
    }
    ends = {"bos_token_id": None, "eos_token_id": None}
    return name, getattr(transformers, f"{name}Config")(**fields, **ends, rope_parameters=rope)
