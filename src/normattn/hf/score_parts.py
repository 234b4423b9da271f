"""Identify the parts of a layer's score: position, temperature, gate and mask.

The configuration proposes values (base, rope scaling, lengths beyond the recorded tokens). A
proposal is accepted only if it gives the measured frequencies.

Legend: B batch, H query heads, T tokens, S keys, E value size, W width.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from normattn.hf.model_parts import layer_type, rope_type_of
from normattn.hf.probe import hidden_keys
from normattn.hf.rotations import TOLERANCE, Rotation, find_base
from normattn.hf.score_record import RecordedLayer, split_heads
from normattn.score import ScoreSpec
from normattn.score.parts import Chunked, Gate, Part, RopeScaling, SlidingWindow
from normattn.score.parts.qk_norm import Baseline
from normattn.score.parts.rope import NoPE, PartialRoPE, PRoPE, RoPE, RotaryPosition
from normattn.score.parts.rope_scaling import PI, Llama3, YaRN
from normattn.score.parts.scale import Temperature
from normattn.score.rotary import frequencies

_NO_ROTATION = 1e-7
_ROUNDING = 1e-4
"""How far rounding may move a number between two texts, as a share of the largest."""


def fit_position(
    rotation: Rotation,
    rope: Mapping[str, Any],
    config: Any,
    head_dim: int,
    gains: tuple[float, ...],
) -> tuple[tuple[Part, ...], int | None] | None:
    """Position and rope scaling that give the measured rotation, and their length; None if none do.

    `gains` are possible factors of q and k in the rotation; empty where they cannot be measured.
    """
    measured = rotation.frequencies
    if float(measured.abs().max()) < _NO_ROTATION:
        return (NoPE(),), None
    scaling, scaling_length = _configured_scaling(rope, config, gains)
    for base in filter(None, (rope.get("rope_theta"), find_base(measured.abs()))):
        position = _position(rotation, rope, config, head_dim, _round_number(float(base)))
        for part, length in ((scaling, scaling_length), (None, None)):
            parts: tuple[Part, ...] = (position,) if part is None else (position, part)
            proposed = frequencies(ScoreSpec((Baseline(), *parts), length), head_dim)
            both = pad_sequence([measured, proposed])  # pairs that do not rotate have θ = 0
            error = float((both[:, 0] - both[:, 1]).abs().max()) * (rotation.amplitude.numel() - 1)
            if error < 10 * TOLERANCE:
                return parts, length
    return None


def _position(
    rotation: Rotation, rope: Mapping[str, Any], config: Any, head_dim: int, base: float
) -> RotaryPosition:
    """The rotary position of this base, with the measured layout."""
    layout = rotation.layout
    pairs: Any = "interleaved" if layout.interleaved else "half"
    share = rope.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None)
    if rope_type_of(rope) == "proportional" and share:
        return PRoPE(base=base, layout=pairs, fraction=share)
    if layout.size == head_dim:
        backward = float(rotation.frequencies[0]) < 0
        return RoPE(base=base, layout=pairs, direction="backward" if backward else "forward")
    side: Any = "last" if layout.start else "first"
    # The shortest that rotates so many features, of which PartialRoPE takes an even number.
    fraction = math.ceil(round(layout.size / head_dim * 1e4, 6)) / 1e4
    return PartialRoPE(base=base, layout=pairs, fraction=fraction, side=side)


def _configured_scaling(
    rope: Mapping[str, Any], config: Any, gains: tuple[float, ...]
) -> tuple[RopeScaling | None, int | None]:
    """The rope scaling of rope parameters, and its training length.

    YaRN's sharpness is measured, and rounded to a common value where one is close.
    """
    length = rope.get("original_max_position_embeddings")
    length = length or getattr(config, "max_position_embeddings", None)
    rope_type, factor = rope_type_of(rope), _round_number(float(rope.get("factor") or 1.0))
    if rope_type in ("linear", "proportional"):
        return (PI(factor=factor) if factor != 1 else None), None
    if rope_type == "llama3":
        low, high = (_round_number(float(rope[f"{end}_freq_factor"])) for end in ("low", "high"))
        return Llama3(factor=factor, low=low, high=high), length
    if rope_type != "yarn":
        return None, None
    sharpness, mscales = 0.1, (rope.get("mscale"), rope.get("mscale_all_dim"))
    if factor > 1:
        if not gains:  # transformers' factor of cos and sin
            above, below = (0.1 * float(mscale or 0) * math.log(factor) + 1 for mscale in mscales)
            amplitude = above / below if all(mscales) else 0.1 * math.log(factor) + 1
            configured = rope.get("attention_factor")
            gains = (amplitude if configured is None else float(configured),)
        measured = [round((gain - 1) / math.log(factor), 4) for gain in gains]
        common = (0.1, 0.1 * float(mscales[1] or 1.0))
        sharpness = next((value for value in common if round(value, 4) in measured), measured[-1])
    ends = ("beta_fast", "beta_slow")
    yarn = YaRN(
        factor=factor,
        truncate=rope.get("truncate") is not False,
        sharpness=_round_number(sharpness),
        **{name: _round_number(float(rope[name])) for name in ends if rope.get(name)},
    )
    return yarn, length


def _round_number(value: float) -> float:
    """A value above 100 with three digits where that is within 0.1 %; else with ten decimals."""
    rounded = float(f"{value:.3g}")
    close = abs(rounded - value) <= 1e-3 * abs(value) and value > 100
    return rounded if close else round(value, 10)


def fit_temperature(
    config: Any, rope: Mapping[str, Any], amplitude: Float[Tensor, " t"], rotates: bool
) -> tuple[Temperature, ...] | None:
    """The position temperature of a layer, if any; None where none gives its measured amplitude."""
    part, expected = None, torch.ones_like(amplitude)
    if (beta := rope.get("llama_4_scaling_beta")) is not None:
        part = Temperature(beta=beta, length=rope.get("original_max_position_embeddings"))
    elif getattr(config, "attn_temperature_tuning", False) and not rotates:
        part = Temperature(beta=config.attn_scale, length=int(config.floor_scale), shift=1)
    if part is not None:
        expected = part.factor(torch.arange(1, amplitude.numel() + 1, dtype=torch.float64), None)
    error = (amplitude / amplitude[0] - expected / expected[0]).abs().max()
    if float(error) >= 10 * TOLERANCE:
        return None
    return () if part is None else (part,)


@dataclass(frozen=True)
class Gating:
    """The output gate's part and its logits (B, T, …); `lacks` says what is not identified."""

    part: Gate | None = None
    logits: Tensor | None = None
    lacks: str | None = None


def read_gate(layer: RecordedLayer) -> Gating:
    """Identify the gate between attention's output and the last projection."""
    out = layer.out.flatten(2)
    gated_outputs = [x for x, _ in layer.projections if x.shape == out.shape]
    if any(torch.equal(x, out) for x in gated_outputs):
        return Gating()
    (heads, size), d = layer.out.shape[2:], layer.q.shape[-1]
    for gated, (_, projected) in itertools.product(gated_outputs, layer.projections):
        if projected.shape[-1] == heads * (d + size):  # after the queries of each head
            projected = split_heads(projected, d + size)[..., d:].transpose(1, 2).flatten(2)
        if projected.shape[-1] not in (heads * size, heads):
            continue
        width, expected = projected.shape[-1] // heads, gated.double().view_as(layer.out)
        logits = projected.double().reshape(*projected.shape[:2], heads, width)
        per: Any = "feature" if width > 1 or size == 1 else "head"
        for part, factor in (
            (Gate(per=per), logits.sigmoid()),
            (Gate(per=per, act="softplus"), F.softplus(logits)),
        ):
            error = (factor * layer.out - expected).abs().max()
            if float(error) <= TOLERANCE * float(expected.abs().max()):
                return Gating(part, logits.flatten(2))
    lacks = "its output is changed before the last projection in a way that no component describes"
    return Gating(lacks=lacks)


@dataclass(frozen=True)
class Masking:
    """The part that hides keys, None for none, and the layer's own mask where it does more.

    `causal`: no query sees a later key. `operand` (B, H or 1, T, S) is the layer's own mask, `note`
    describes it, and `lacks` says what is not identified.
    """

    part: SlidingWindow | Chunked | None = None
    causal: bool = True
    operand: Tensor | None = None
    note: str | None = None
    lacks: str | None = None


def read_mask(layer: RecordedLayer, config: Any) -> Masking:
    """Identify what the mask hides and adds, by comparing different texts."""
    tokens, mask = layer.q.shape[2], layer.mask
    indexed = layer.kwargs.get("indices") is not None
    few = f"its indexer leaves out none of {tokens} tokens: use more tokens" if indexed else None
    if mask is None:
        return Masking(causal=False, lacks=few)
    hidden = hidden_keys(mask)
    added = mask.masked_fill(hidden, 0.0)
    causal = not bool((~hidden[0, 0]).triu(1).any())
    same = bool((hidden == hidden[:1, :1]).all())  # in every text and head
    part = _hiding_part(layer, config, ~hidden, same) if causal else None
    both = ~hidden & ~hidden[:1]
    change = torch.where(both, added - added[:1], 0.0).abs().max()
    adding_varies = bool(change > _ROUNDING * torch.where(both, added, 0.0).abs().max())
    if not adding_varies and not bool((hidden != hidden[:1]).any()):  # the same in every text
        return Masking(part, causal, lacks=few)
    note = "its mask depends on the text (attn_mask)"
    if indexed:
        note = "an indexer chooses the keys of each query (attn_mask)"
    return Masking(part, causal, mask.cpu(), note)


def _hiding_part(
    layer: RecordedLayer, config: Any, visible: Bool[Tensor, "b h t t"], same: bool
) -> SlidingWindow | Chunked | None:
    """The part that hides the same keys as a causal mask; None where no part does.

    A window longer than the text comes from the configuration, and so does one of a mask that hides
    more by the text or by the head (not `same`).
    """
    configured = _configured_window(layer, config)
    positions = torch.arange(visible.shape[-1], device=visible.device)
    distance = positions[:, None] - positions
    if not same:
        windowed = isinstance(configured, SlidingWindow) and configured.window
        return configured if windowed and not visible[..., distance >= windowed].any() else None
    shown, causal = visible[0, 0], distance >= 0
    window = int(torch.where(shown, distance, 0).max()) + 1
    if torch.equal(shown, causal):
        return configured
    if torch.equal(shown, causal & (distance < window)):
        return SlidingWindow(window=window)
    if isinstance(configured, Chunked) and configured.size:
        chunk = positions // configured.size
        return configured if torch.equal(shown, causal & (chunk[:, None] == chunk)) else None
    return None


def _configured_window(layer: RecordedLayer, config: Any) -> SlidingWindow | Chunked | None:
    window = layer.sliding_window
    if layer_type(config, layer.index) == "chunked_attention":
        return Chunked(size=config.attention_chunk_size)
    return None if window is None else SlidingWindow(window=window)
