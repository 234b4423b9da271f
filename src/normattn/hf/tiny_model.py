"""A small random model of a configuration, and the positions that it computes.

The model has the same layers, with few heads of the configured size. It is probed at a short, the
trained and the longest length, because values depend on the length: dynamic NTK and LongRoPE change
frequencies, and Llama 4's temperature grows with the position.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from normattn.errors import InputError
from normattn.hf.load import refuse_infinite_frequencies
from normattn.hf.model_parts import ModelParts, explained, model_parts
from normattn.hf.probe import PROBE_TOKENS, AttentionCall, Layer, probe, replay, spectra_of
from normattn.hf.rotations import Spectrum, read_tables

_RANK = 16
"""The smallest rank of latent vectors in a small model; others are multiples of it."""
_MAX_SIZES = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 64),
    **dict.fromkeys(("intermediate_size", "intermediate_size_mlp", "ffn_hidden_size"), 32),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("index_topk", "indexer_budget", "keep_window_size"), 8),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 2),
    **dict.fromkeys(("num_experts_per_tok", "indexer_compress_ratio"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group"), 1),
}
"""Upper bounds of fields in a small model; also of lists with a value for each layer."""
_TOKEN_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
_MAX_PLAUSIBLE = {"num_hidden_layers": 1000, "head_dim": 4096, "max_position_embeddings": 1 << 31}
"""Larger values raise an error, because a model of them would not fit in memory."""


def small_model(config: Any) -> Any:
    """A small random causal language model of this configuration, with two heads.

    Layers, their types, the head dimension and everything about positions are as configured. Layers
    that select keys select few, so that a short text shows it. Weights are large enough for uneven
    attention. Raises `InputError` where transformers cannot build the model, and for implausible
    sizes.
    """
    import transformers

    config = copy.deepcopy(config)
    text = config.get_text_config()
    if not hasattr(text, "model_type"):
        raise InputError(f"the text model of a {config.model_type} configuration is {text!r}")
    if text.model_type.startswith("normattn"):
        raise InputError(
            "this is normattn's own model in transformers' format, which extend does not "
            "support: use `normattn evaluate RUN --methods …`, or save "
            "normattn.hf.to_llama(model)"
        )
    auto: Any = transformers.AutoModelForCausalLM
    with explained(f"a small {text.model_type} model"):
        _shrink(text)
        text._attn_implementation = "eager"
        torch.manual_seed(0)
        model = auto.from_config(text, attn_implementation="eager").float().eval()
    refuse_infinite_frequencies(model, f"a {text.model_type} model")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            vector = weight.dim() < 2
            weight.copy_(weight + 0.2 * noise if vector else noise / weight.shape[-1] ** 0.5)
    return model


def in_float64(model: Any) -> Any:
    """The model in float64 where its family supports that, for smaller rounding errors."""
    try:
        with torch.no_grad():
            model.double()(torch.tensor([[0, 0]]), use_cache=False)
    except (RuntimeError, TypeError, ValueError, AttributeError, KeyError):
        return model.float()
    return model


def _shrink(text: Any) -> None:
    heads = getattr(text, "num_attention_heads", None)
    if not isinstance(heads, int) or heads < 1:
        raise InputError(
            f"the configuration of a {text.model_type} model names no number of attention heads "
            f"(num_attention_heads is {heads!r}), so there is no score to read"
        )
    groups = int(getattr(text, "num_key_value_heads", None) or heads)
    try:
        head_dim = getattr(text, "head_dim", None)
    except RuntimeError:  # raised where layers have different sizes
        head_dim = text.__dict__.get("head_dim")
    head_dim = head_dim or text.hidden_size // heads
    for name, limit in _MAX_PLAUSIBLE.items():
        size = head_dim if name == "head_dim" else getattr(text, name, None)
        if isinstance(size, int | float) and not 0 < size <= limit:
            raise InputError(f"{name}={size:,} is no size of a {text.model_type} model")
    limits = {name: limit for name, limit in _MAX_SIZES.items() if hasattr(text, name)}
    sizes = {name: _cap(getattr(text, name), limit) for name, limit in limits.items()}
    sizes |= {name: value for name, value in _TOKEN_IDS.items() if hasattr(text, name)}
    sizes |= {"num_attention_heads": 2, "hidden_size": 2 * int(head_dim)} | _scale_ranks(text)
    # The heads of Mamba layers next to attention make up a multiple of the width.
    expand, own_width = getattr(text, "mamba_expand", None), hasattr(text, "mamba_d_ssm")
    if isinstance(expand, int) and hasattr(text, "mamba_n_heads") and not own_width:
        width = expand * sizes["hidden_size"]
        sizes |= {"mamba_n_heads": 2, "mamba_n_groups": 1, "mamba_d_head": width // 2}
    if hasattr(text, "num_key_value_heads"):
        sizes["num_key_value_heads"] = 2 if groups == heads else 1
    for name, value in sizes.items():
        setattr(text, name, value)


def _scale_ranks(text: Any) -> dict[str, int]:
    """The width and latent ranks with their ratios kept, because some families scale by them."""
    names = ("hidden_size", "q_lora_rank", "kv_lora_rank")
    ranks: dict[str, Any] = {name: getattr(text, name, None) for name in names}
    ranks = {name: size for name, size in ranks.items() if isinstance(size, int) and size > 0}
    common = math.gcd(*ranks.values())
    if len(ranks) < 2 or common < 2 * _RANK or common % _RANK:
        return {}
    return {name: size // (common // _RANK) for name, size in ranks.items()}


def _cap(size: Any, limit: int) -> Any:
    if isinstance(size, list):
        return [_cap(item, limit) for item in size]
    return min(size, limit) if isinstance(size, int) else limit


SHORT = PROBE_TOKENS
_UNREADABLE = "cannot be asked what it computes at"
_TOLERANCE = 1e-4
"""The relative tolerance of compared values, which are computed in float32."""


@dataclass(frozen=True)
class LayerValues:
    """The position values of one layer at one length."""

    frequencies: Tensor | None  # angles for each token (P,), 0 without rotation; None without RoPE
    amplitude: float  # the factor of cos and sin
    scale: float  # the factor of the logits at this length
    window: int | None  # the sliding window in tokens


Positions = dict[int, dict[int, LayerValues]]
"""By length, then by layer."""


def read_positions(config: Any, lengths: Sequence[int]) -> Positions:
    """The position values of each layer at each length, at the short one if none rotates."""
    parts = model_parts(small_model(config))
    probed = probe(parts)

    def read(length: int, calls: dict[Any, list[AttentionCall]]) -> dict[int, LayerValues]:
        layers = {}
        for layer in probed:
            call, short = calls.get(layer.module, layer.calls)[0], layer.call
            frequencies, amplitude = _spectrum(parts, layer, length) or (None, 1.0)
            _, short_amplitude = _spectrum(parts, layer, SHORT) or (None, 1.0)
            scale = float(call.q.norm() / short.q.norm()) * float(call.kwargs.get("scaling") or 1)
            if short_amplitude > 0 and amplitude > 0:  # which is reported separately
                scale *= short_amplitude / amplitude
            window = short.sliding_window
            layers[layer.index] = LayerValues(frequencies, amplitude, scale, window)
        return layers

    positions = {SHORT: read(SHORT, {})}
    if not rotates(positions):
        return positions
    for length in sorted(length for length in set(lengths) if length > SHORT):
        # Some families take no position_ids, or not these.
        with explained(parts.name, f"{_UNREADABLE} {length:,} tokens: its forward rejects them"):
            calls, _ = replay(parts, probed, start=length - SHORT)
        positions[length] = read(length, calls)
    return positions


def _spectrum(parts: ModelParts, layer: Layer, length: int) -> Spectrum | None:
    """The frequencies and amplitude of a layer's tables at a length; None without RoPE."""
    if layer.unrotated is None or torch.equal(layer.unrotated.q, layer.call.q):
        return None
    if layer.rotary is None:
        tables = read_tables(layer.tables, spectra_of(parts.model))
        return None if tables is None else (tables.frequencies, tables.amplitude)
    module, layer_type = layer.rotary
    with explained(parts.name, f"{_UNREADABLE} {length:,} tokens: its rotary module rejects them"):
        tables = layer.tables_at(torch.tensor([[length - 1]]))
    buffer: Any = getattr(module, f"{layer_type}_inv_freq", getattr(module, "inv_freq", None))
    if not isinstance(buffer, Tensor):
        return None
    cos, sin = (tables.real, tables.imag) if isinstance(tables, Tensor) else tables
    amplitude = float((cos.double() ** 2 + sin.double() ** 2).flatten()[0] ** 0.5)
    return buffer.detach().double().cpu().flatten(), amplitude


def rotates(positions: Positions) -> bool:
    """Whether some layer has rotary positions."""
    return any(values.frequencies is not None for values in positions[SHORT].values())


def differences(expected: Positions, computed: Positions) -> Iterator[str]:
    """A sentence for each kind of value that is not as expected."""
    if expected[SHORT].keys() != computed[SHORT].keys():
        yield (
            f"layers: {sorted(computed[SHORT])} instead of {sorted(expected[SHORT])}: this is "
            "another model's configuration"
        )
        return
    reported: set[tuple[str, bool]] = set()
    for length in sorted(expected.keys() & computed.keys()):
        for index, values in expected[length].items():
            windowed = values.window is not None
            for kind, sentence in _layer_differences(values, computed[length][index]):
                if (kind, windowed) not in reported:
                    prefix = "layers within a window: " if windowed else ""
                    yield f"{prefix}{kind}: {sentence} (layer {index}, at {length:,} tokens)"
                reported.add((kind, windowed))


def _layer_differences(expected: LayerValues, computed: LayerValues) -> Iterator[tuple[str, str]]:
    """The kind of each value that differs, and how."""
    theta, other = expected.frequencies, computed.frequencies
    if theta is None or other is None:
        if theta is not other:
            yield "rotary positions", "none" if other is None else "some instead of none"
    elif theta.shape != other.shape:
        width = f"{2 * other.numel()} features rotate instead of {2 * theta.numel()}"
        yield "rotary width", width
    else:
        largest = torch.maximum(theta.abs(), other.abs()).clamp(min=1e-30)
        error = (theta - other).abs() / largest
        if float(error.max()) > _TOLERANCE:
            pair = int(error.argmax())
            yield (
                "inverse frequencies",
                f"{int((error > _TOLERANCE).sum())} of {theta.numel()} differ, pair {pair} turns "
                f"by {float(other[pair]):.4g} a token instead of {float(theta[pair]):.4g}",
            )
    for kind, prefix, one, two in (
        ("attention factor", "cos and sin times ", expected.amplitude, computed.amplitude),
        ("softmax scale", "", expected.scale, computed.scale),
    ):
        if abs(one - two) > 10 * _TOLERANCE * abs(one):
            yield kind, f"{prefix}{two:.5g} instead of {one:.5g}"
    if expected.window != computed.window:
        yield "window", f"{computed.window or 'none'} instead of {expected.window or 'none'}"
