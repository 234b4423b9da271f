"""A small random model of a configuration, and what it computes of positions.

It has the same layers, heads narrow in number, not in size. It is probed at a short, the trained
and the longest length, so that the family's own code answers: dynamic NTK and LongRoPE change
frequencies with the length, DeepSeek's mscale changes the softmax scale, and Llama 4's temperature
grows with the position.
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
from normattn.hf.load import refuse_endless
from normattn.hf.model_parts import ModelParts, explained, model_parts
from normattn.hf.probe import COUNT, AttentionCall, ProbedLayer, probe, replay
from normattn.hf.rope_detection import Spectrum, read_tables, spectra_of

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
            "this is normattn's own model in transformers' format, which extend does not "
            "support: use `normattn evaluate RUN --methods …`, or save "
            "normattn.hf.to_llama(model)"
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
    # Mamba layers next to attention, whose heads make up a multiple of the width.
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


SHORT = COUNT
"""The tokens of a short text."""
_CANNOT = "cannot be asked what it computes at"
_CLOSE = 1e-4
"""How far values may differ, as a share: configurations are read in float32."""


@dataclass(frozen=True)
class LayerValues:
    """What one layer computes at one length.

    Attributes:
        frequencies: angles a token (P,), zeros where features do not rotate; None without RoPE.
        amplitude: what cos and sin are multiplied with.
        scale: what the scores are multiplied with before the softmax, the growth of queries at
            this length included.
        window: how many tokens the layer sees; None for all.
    """

    frequencies: Tensor | None
    amplitude: float
    scale: float
    window: int | None


Positions = dict[int, dict[int, LayerValues]]
"""By length, then by layer."""


def read_positions(config: Any, lengths: Sequence[int]) -> Positions:
    """What each layer of a configuration's model computes at each length.

    At the short length alone where no layer rotates. Raises `InputError` for a family whose values
    at greater lengths cannot be read.
    """
    parts = model_parts(small_model(config))
    probed = probe(parts)

    def read(length: int, calls: dict[Any, list[AttentionCall]]) -> dict[int, LayerValues]:
        layers = {}
        for position, one in enumerate(probed.values()):
            index = getattr(one.module, "layer_idx", None)
            call = calls.get(one.module, one.calls)[0]
            values = _layer_values(parts, one, call, length)
            layers[index if isinstance(index, int) else position] = values
        return layers

    positions = {SHORT: read(SHORT, {})}
    if not rotates(positions):
        return positions
    for length in sorted(length for length in set(lengths) if length > SHORT):
        # Some families take no position ids, or not these.
        with explained(parts.name, f"{_CANNOT} {length:,} tokens: its forward rejects them"):
            calls, _ = replay(parts, probed, start=length - SHORT)
        positions[length] = read(length, calls)
    return positions


def _layer_values(
    parts: ModelParts, one: ProbedLayer, call: AttentionCall, length: int
) -> LayerValues:
    frequencies, amplitude = _spectrum(parts, one, length) or (None, 1.0)
    at_start = (_spectrum(parts, one, SHORT) or (None, 1.0))[1]
    scale = float(call.q.norm() / one.call.q.norm()) * float(call.more.get("scaling") or 1)
    if one.unrotated is not None and at_start > 0 and amplitude > 0:
        scale *= at_start / amplitude  # what the amplitude of the tables adds to the queries
    return LayerValues(frequencies, amplitude, scale, one.call.sliding)


def _spectrum(parts: ModelParts, one: ProbedLayer, length: int) -> Spectrum | None:
    """The frequencies and the amplitude of a layer's tables at a length; None without RoPE."""
    if one.unrotated is None or torch.equal(one.unrotated.q, one.call.q):
        return None
    if one.rotary is None:
        tables = read_tables(one.tables, spectra_of(parts.model))
        return None if tables is None else (tables.frequencies, tables.amplitude)
    module, kind = one.rotary
    first = one.tables if isinstance(one.tables, Tensor) else one.tables[0]
    rows = torch.zeros(1, 1, 1, dtype=first.real.dtype)
    with explained(parts.name, f"{_CANNOT} {length:,} tokens: its rotary module rejects them"):
        made = module(rows, torch.tensor([[length - 1]]), *([kind] if kind else []))
    held: Any = getattr(module, f"{kind}_inv_freq", getattr(module, "inv_freq", None))
    if not isinstance(held, Tensor):
        return None
    cos, sin = (made.real, made.imag) if isinstance(made, Tensor) else made
    amplitude = float((cos.double() ** 2 + sin.double() ** 2).flatten()[0] ** 0.5)
    return held.detach().double().cpu().flatten(), amplitude


def rotates(positions: Positions) -> bool:
    """Whether some layer has rotary positions."""
    return any(values.frequencies is not None for values in positions[SHORT].values())


def differences(meant: Positions, given: Positions) -> Iterator[str]:
    """What is computed otherwise than meant: one sentence for each kind of value."""
    if meant[SHORT].keys() != given[SHORT].keys():
        yield (
            f"layers: {sorted(given[SHORT])} instead of {sorted(meant[SHORT])}: this is another "
            "model's configuration"
        )
        return
    reported: set[tuple[str, bool]] = set()
    for length in sorted(meant.keys() & given.keys()):
        for index, values in meant[length].items():
            within = values.window is not None
            for kind, sentence in _differ(values, given[length][index]):
                if (kind, within) not in reported:
                    who = "layers within a window: " if within else ""
                    yield f"{who}{kind}: {sentence} (layer {index}, at {length:,} tokens)"
                reported.add((kind, within))


def _differ(meant: LayerValues, given: LayerValues) -> Iterator[tuple[str, str]]:
    """Each kind of value that differs, and how."""
    one, other = meant.frequencies, given.frequencies
    if one is None or other is None:
        if one is not other:
            yield "rotary positions", "none" if other is None else "some instead of none"
    elif one.shape != other.shape:
        width = f"{2 * other.numel()} features rotate instead of {2 * one.numel()}"
        yield "rotary width", width
    else:
        off = (one - other).abs() / torch.maximum(one.abs(), other.abs()).clamp(min=1e-30)
        if float(off.max()) > _CLOSE:
            pair = int(off.argmax())
            yield (
                "inverse frequencies",
                f"{int((off > _CLOSE).sum())} of {one.numel()} differ, pair {pair} turns by "
                f"{float(other[pair]):.4g} a token instead of {float(one[pair]):.4g}",
            )
    if abs(meant.amplitude - given.amplitude) > 10 * _CLOSE * abs(meant.amplitude):
        factor = f"cos and sin times {given.amplitude:.5g} instead of {meant.amplitude:.5g}"
        yield "attention factor", factor
    if abs(meant.scale - given.scale) > 10 * _CLOSE * abs(meant.scale):
        yield "softmax scale", f"{given.scale:.5g} instead of {meant.scale:.5g}"
    if meant.window != given.window:
        yield "window", f"{given.window or 'none'} instead of {meant.window or 'none'}"
