"""Weights of Llama-shaped models into ours, and of ours into theirs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from normattn.errors import InputError
from normattn.hf.extend import extension_of
from normattn.hf.native import refuse_applied
from normattn.layers.feed_forward import swiglu_hidden
from normattn.models.causal_lm import CausalLM
from normattn.models.config import CausalLMConfig
from normattn.models.utils import on_meta
from normattn.score import ScoreSpec
from normattn.score.parts import RopeScaling
from normattn.score.parts.rope_scaling import PI, Llama3

# Their part of a layer, and ours.
_LAYER = {
    "input_layernorm.weight": "mixer.norm.gain",
    "self_attn.o_proj.weight": "mixer.sublayer.out.weight",
    "self_attn.q_norm.weight": "mixer.sublayer.score.query_norm.weight",
    "self_attn.k_norm.weight": "mixer.sublayer.score.key_norm.weight",
    "post_attention_layernorm.weight": "feed_forward.norm.gain",
    "mlp.down_proj.weight": "feed_forward.sublayer.down.weight",
}
# Theirs that ours holds as one matrix, in this order.
_JOINED = {
    "mixer.sublayer.qkv.weight": [f"self_attn.{letter}_proj.weight" for letter in "qkv"],
    "mixer.sublayer.qkv.bias": [f"self_attn.{letter}_proj.bias" for letter in "qkv"],
    "feed_forward.sublayer.up.weight": [f"mlp.{name}_proj.weight" for name in ("gate", "up")],
}
_WHOLE = {
    "model.embed_tokens.weight": "embedding.weight",
    "model.norm.weight": "final_norm.gain",
    "lm_head.weight": "head.weight",
}
_BIASES = tuple(f"self_attn.{letter}_proj.bias" for letter in "qkv")
_NORMS = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")
_FIELDS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "hidden_act"),
    *("num_attention_heads", "rms_norm_eps", "max_position_embeddings", "rope_parameters"),
)


def from_llama(model: Any) -> CausalLM:
    """A `CausalLM` that computes what a model of Llama's shape computes: Llama, Qwen2, Qwen3, ….

    What counts is the shape, not the name: its weights are those of Llama's layers, with biases of
    q, k and v or with norms of q and k for each head, and its logits of a few tokens are ours. The
    weights are copies, of the same dtype and on the same device; logits agree up to rounding.
    `max_position_embeddings` becomes the training length; a spectrum of the kinds `linear` and
    `llama3` becomes PI or Llama3, trained in. Dropout, which only training sees, is not carried
    over. Raises `InputError` for another shape or other logits, rotary positions scaled in another
    way, sliding windows, biases beyond those of q, k and v, and another activation than SiLU.
    """
    config = _our_config(model)
    theirs = model.state_dict()
    ours = {mine: theirs[name].clone() for name, mine in _WHOLE.items() if name in theirs}
    if config.tie_head:
        ours.pop("head.weight", None)
    for layer in range(config.layers):
        ours |= _layer_of(theirs, f"model.layers.{layer}.", f"blocks.{layer}.")
    with on_meta():
        made = CausalLM(config)
    made.load_state_dict(ours, assign=True)
    _refuse_other_logits(model, made)
    return made.train(model.training)


def to_llama(model: CausalLM) -> Any:
    """The transformers model that computes what `model` computes as it was trained.

    A `LlamaForCausalLM`; a `Qwen2ForCausalLM` where q, k and v have biases, a `Qwen3ForCausalLM`
    where the score is QKRMSNorm. The weights are copies; PI and Llama3 are carried over where they
    were trained in, dropout and a method that is switched on are not. Raises `InputError` where
    neither can say what the model's settings say.
    """
    name, config = _their_config(model.config)
    import transformers

    with on_meta():
        made = getattr(transformers, f"{name}ForCausalLM")(config)
    ours = model.state_dict()
    theirs = {name: ours[mine].clone() for name, mine in _WHOLE.items() if mine in ours}
    for layer in range(model.config.layers):
        theirs |= _layer_to(ours, model.config, f"blocks.{layer}.", f"model.layers.{layer}.")
    if model.config.tie_head:
        theirs["lm_head.weight"] = theirs["model.embed_tokens.weight"]
    made.load_state_dict(theirs, assign=True)
    made.tie_weights()
    _fill_rotation(made, model.head_weight.device)
    return made.train(model.training)


def _layer_of(theirs: dict[str, Tensor], before: str, after: str) -> dict[str, Tensor]:
    """One layer under our names."""
    ours = {
        after + mine: theirs[before + name].clone()
        for name, mine in _LAYER.items()
        if before + name in theirs
    }
    for mine, names in _JOINED.items():
        if before + names[0] in theirs:
            ours[after + mine] = torch.cat([theirs[before + name] for name in names])
    return ours


def _layer_to(
    ours: dict[str, Tensor], config: CausalLMConfig, before: str, after: str
) -> dict[str, Tensor]:
    """One layer under their names."""
    theirs = {
        after + name: ours[before + mine].clone()
        for name, mine in _LAYER.items()
        if before + mine in ours
    }
    heads = (config.heads, *[config.kv_heads or config.heads] * 2)
    for mine, names in _JOINED.items():
        whole = ours.get(before + mine)
        if whole is None:
            continue
        sizes = [count * config.score_head_dim for count in heads]
        if len(names) == 2:
            sizes = [whole.shape[0] // 2] * 2
        parts = torch.split(whole, sizes)
        theirs |= {after + name: part.clone() for name, part in zip(names, parts, strict=True)}
    return theirs


def _our_config(model: Any) -> CausalLMConfig:
    theirs: Any = getattr(model, "config", None)
    _refuse_fields(model, theirs)
    _refuse_extended(model, theirs)
    rope = theirs.rope_parameters or {}
    _refuse_theirs(theirs, rope, type(model).__name__)
    held = _refuse_weights(model, theirs)
    spectrum = spectrum_of(rope, theirs.max_position_embeddings)
    normed = _NORMS[0] in held
    eps = {"eps": theirs.rms_norm_eps} if normed else {}
    score = ScoreSpec.parse(
        "QKRMSNorm-RoPE" if normed else "Baseline-RoPE", base=float(rope["rope_theta"]), **eps
    )
    if spectrum is not None:
        score = ScoreSpec((*score.parts, spectrum))
    return CausalLMConfig(
        vocab_size=theirs.vocab_size,
        dim=theirs.hidden_size,
        layers=theirs.num_hidden_layers,
        heads=theirs.num_attention_heads,
        kv_heads=theirs.num_key_value_heads,
        head_dim=getattr(theirs, "head_dim", None),
        hidden=theirs.intermediate_size,
        norm_eps=theirs.rms_norm_eps,
        train_length=theirs.max_position_embeddings,
        tie_head=bool(theirs.tie_word_embeddings),
        qkv_bias=_BIASES[0] in held,
        score=score,
    )


def _refuse_fields(model: Any, theirs: Any) -> None:
    """Raise `InputError` for what is no causal model with Llama's settings."""
    lacking = [field for field in _FIELDS if not hasattr(theirs, field)]
    if lacking or not hasattr(model, "lm_head"):
        reason = f"its configuration has no {lacking[0]}" if lacking else "it has no lm_head"
        raise InputError(
            f"a {type(model).__name__} cannot become a CausalLM: {reason}, as causal models of "
            "Llama's shape have"
        )


def _refuse_extended(model: Any, theirs: Any) -> None:
    """Raise `InputError` for a method after training, which would become one trained in."""
    extension = extension_of(model)
    if extension is not None:
        raise InputError(
            f"this {type(model).__name__} is extended, by {extension.spec.method}, and would "
            "become a CausalLM that was trained so: remove() the extension first"
        )
    refuse_applied(theirs)


def _refuse_weights(model: Any, theirs: Any) -> set[str]:
    """The names of a layer's weights; `InputError` unless all weights are those of our layers."""
    name = f"a {type(model).__name__} cannot become a CausalLM"
    whole = {*_LAYER, *(weight for names in _JOINED.values() for weight in names)}
    needed = whole - {*_BIASES, *_NORMS}
    shapes = [needed, needed | set(_BIASES), needed | set(_NORMS)]
    layers: dict[str, set[str]] = {}
    for weight in model.state_dict():
        index, _, rest = weight.removeprefix("model.layers.").partition(".")
        if weight.startswith("model.layers.") and index.isdigit():
            layers.setdefault(index, set()).add(rest)
        elif weight not in _WHOLE:
            raise InputError(f"{name}: it has the weight {weight}, which Llama's shape has not")
    held = layers.get("0", set())
    other = [names for names in layers.values() if names != held]
    if held not in shapes or other or len(layers) != theirs.num_hidden_layers:
        odd = sorted((held ^ needed) - {*_BIASES, *_NORMS} or held ^ needed or {"layers"})
        raise InputError(f"{name}: its layers are not Llama's, which differ by {odd[0]}")
    return held


def _refuse_other_logits(model: Any, made: CausalLM) -> None:
    """Raise `InputError` where a few tokens show that the same weights compute something else."""
    ids = torch.arange(9, device=model.lm_head.weight.device)[None] % made.config.vocab_size
    modes = [(module, module.training) for module in model.modules()]
    with torch.no_grad():
        theirs = model.eval()(input_ids=ids, use_cache=False).logits.double()
        ours = made.eval()(ids).double()
    for module, mode in modes:
        module.training = mode
    close = 1e-3 if model.lm_head.weight.dtype in (torch.float32, torch.float64) else 0.2
    if not float((ours - theirs).norm()) <= close * float(theirs.norm()):
        raise InputError(
            f"a {type(model).__name__} cannot become a CausalLM: it has the weights of Llama's "
            "shape, but computes other logits with them"
        )


def _refuse_theirs(theirs: Any, rope: dict[str, Any], name: str) -> None:
    """Raise `InputError` for what our settings cannot say."""
    layers = set(getattr(theirs, "layer_types", None) or ())
    windowed = getattr(theirs, "sliding_window", None) is not None
    unknown = [key for key, value in rope.items() if value is not None and key not in ROPE_KEYS]
    reason = None
    if rope.get("rope_type", "default") not in ROPE_TYPES:
        reason = f"rotary positions scaled by {rope['rope_type']!r}"
    elif rope.get("partial_rotary_factor", 1.0) != 1.0:
        reason = "a partial rotation"
    elif unknown:
        reason = f"the setting {unknown[0]!r} of rotary positions, which ours have not"
    elif layers - {"full_attention"} or (windowed and not layers):
        reason = "layers with a sliding window"
    elif getattr(theirs, "attention_bias", False):
        reason = "a bias of the attention's output"
    elif getattr(theirs, "mlp_bias", False):
        reason = "biases of the feed-forward layers"
    elif theirs.hidden_act not in ("silu", "swish"):
        reason = f"the activation {theirs.hidden_act!r} in place of SiLU"
    if reason is not None:
        raise InputError(f"this {name} cannot become a CausalLM, because it has {reason}")


def _their_config(config: CausalLMConfig) -> tuple[str, Any]:
    _refuse_ours(config)
    import transformers

    normed = config.score.variant.name == "QKRMSNorm"
    name = "Qwen3" if normed else "Qwen2" if config.qkv_bias else "Llama"
    position: Any = config.score.position
    make = getattr(transformers, f"{name}Config")
    made = make(
        vocab_size=config.vocab_size,
        hidden_size=config.dim,
        intermediate_size=_hidden(config),
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads or config.heads,
        head_dim=config.score_head_dim,
        max_position_embeddings=config.train_length,
        rms_norm_eps=config.norm_eps,
        tie_word_embeddings=config.tie_head,
        rope_parameters=rope_parameters(
            config.score.rope_scaling, position.base, config.train_length
        ),
        bos_token_id=None,
        eos_token_id=None,
    )
    return name, made


def _hidden(config: CausalLMConfig) -> int:
    return config.hidden or swiglu_hidden(config.dim)


def _refuse_ours(config: CausalLMConfig) -> None:
    """Raise `InputError` for what no Llama-shaped configuration says."""
    spec, variant = config.score, config.score.variant
    wanted = {"block": "mha", "placement": "PreLN", "norm": "rms", "norm_gain": True}
    wanted |= {"feed_forward": "swiglu", "shared_layers": False}
    for name, value in wanted.items():
        if getattr(config, name) != value:
            raise InputError(
                f"{name} {getattr(config, name)!r} has no counterpart in Llama, Qwen2 or Qwen3, "
                f"whose models have {value!r}"
            )
    plain = ScoreSpec.parse("Baseline-RoPE", config.train_length, base=_base(spec))
    normed = ScoreSpec.parse(
        "QKRMSNorm-RoPE", config.train_length, base=_base(spec), eps=config.norm_eps
    )
    bare = ScoreSpec(
        tuple(part for part in spec.parts if part is not spec.rope_scaling), spec.train_length
    )
    if bare not in (plain, normed):
        raise InputError(
            f"the score {spec} has no counterpart in Llama, Qwen2 or Qwen3: those have {plain}, or "
            f"{normed} with the norms' own eps"
        )
    if config.qkv_bias and variant.name == "QKRMSNorm":
        raise InputError(
            "qkv_bias beside QKRMSNorm has no counterpart: Qwen3 biases the output too"
        )


def _base(spec: ScoreSpec) -> float:
    return float(getattr(spec.position, "base", 10000.0))


def _fill_rotation(model: Any, device: torch.device) -> None:
    """The frequencies, which are no part of the weights, on the meta device until now."""
    with device:
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)


ROPE_TYPES = ("default", "linear", "llama3")
"""Those of transformers that some spectrum here equals at every length."""
ROPE_KEYS = frozenset(
    {
        *("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor"),
        *("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    }
)
"""What these kinds are told. Others may do more than turn, such as Ministral 3's temperature."""


def spectrum_of(rope: dict[str, Any], train_length: int) -> RopeScaling | None:
    """What `rope_parameters` say, for a score whose training length is `train_length`.

    Llama3 counts turns within the training length, `llama3` within
    `original_max_position_embeddings`: the ends of its blend are scaled by their ratio. The kind
    must be one of `ROPE_TYPES`.
    """
    kind = rope.get("rope_type", "default")
    if kind == "default":
        return None
    factor = float(rope["factor"])
    if kind == "linear":
        return PI(factor=factor)
    longer = train_length / rope["original_max_position_embeddings"]
    low, high = (longer * rope[f"{end}_freq_factor"] for end in ("low", "high"))
    return Llama3(factor=factor, low=low, high=high)


def rope_parameters(spectrum: RopeScaling | None, base: float, train_length: int) -> dict[str, Any]:
    """The `rope_parameters` of a score's spectrum; `InputError` where they cannot say it."""
    theta = {"rope_theta": base}
    if spectrum is None:
        return {"rope_type": "default", **theta}
    if isinstance(spectrum, PI):
        return {"rope_type": "linear", "factor": spectrum.stretch, **theta}
    if isinstance(spectrum, Llama3):
        ends = {"low_freq_factor": spectrum.low, "high_freq_factor": spectrum.high}
        known = {"factor": spectrum.stretch, "original_max_position_embeddings": train_length}
        return {"rope_type": "llama3", **known, **ends, **theta}
    raise InputError(f"the spectrum {spectrum.name} has no counterpart in Llama, Qwen2 or Qwen3")
