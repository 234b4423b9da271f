"""From what a layer was recorded to do, and what its configuration says, to the parts of its score.

The configuration proposes (bases, rope scaling, lengths that few tokens cannot show); what was
measured decides: a proposal that does not give the measured frequencies is none. A mask and an
output gate are parts too, where they are those of some part.

Legend: B batch, H query heads, T tokens, S keys, E value size, W width.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from normattn.hf.model_parts import layer_type, rope_type_of
from normattn.hf.probe import hidden
from normattn.hf.score_record import CLOSE, RecordedLayer, Rotation, heads_of, plain_base
from normattn.score import ScoreSpec
from normattn.score.parts import Chunked, Gate, Part, RopeScaling, SlidingWindow
from normattn.score.parts.qk_norm import Baseline
from normattn.score.parts.rope import NoPE, PartialRoPE, PRoPE, RoPE, RotaryPosition
from normattn.score.parts.rope_scaling import PI, Llama3, YaRN
from normattn.score.parts.scale import Temperature
from normattn.score.rotary import frequencies

_STILL = 1e-7
_ROUNDED = 1e-4
"""How far numbers of two texts may be apart by rounding alone, as a share of the largest."""


def position_parts(
    rotation: Rotation,
    rope: Mapping[str, Any],
    config: Any,
    head_dim: int,
    gains: tuple[float, ...],
) -> tuple[tuple[Part, ...], int | None] | None:
    """Position and rope scaling, with the length that they need; None where none fits.

    `gains` are what the rotation may multiply q and k with by what was measured; none where that
    cannot be told.
    """
    if float(rotation.theta.abs().max()) < _STILL:
        return (NoPE(),), None
    pairs = head_dim // 2
    measured = torch.nn.functional.pad(rotation.theta, (0, pairs - rotation.theta.numel()))
    for position, scaling, length in _proposals(rotation, rope, config, head_dim, gains):
        parts: tuple[Part, ...] = (position,) if scaling is None else (position, scaling)
        named = frequencies(ScoreSpec((Baseline(), *parts), length), head_dim)
        named = torch.nn.functional.pad(named, (0, pairs - named.numel()))
        off = float((measured - named).abs().max()) * (rotation.size.numel() - 1)
        if off < 10 * CLOSE:
            return parts, length
    return None


def _proposals(
    rotation: Rotation,
    rope: Mapping[str, Any],
    config: Any,
    head_dim: int,
    gains: tuple[float, ...],
) -> Iterator[tuple[RotaryPosition, RopeScaling | None, int | None]]:
    """What the configuration says, then a plain row of frequencies that fits."""
    size = 2 * rotation.theta.numel()
    share = rope.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None)
    backward = float(rotation.theta[0]) < 0
    bases = (rope.get("rope_theta"), plain_base(-rotation.theta if backward else rotation.theta))
    for base in filter(None, bases):
        own: dict[str, Any] = {"base": _nice(float(base))}
        own["layout"] = "interleaved" if rotation.interleaved else "half"
        position: RotaryPosition
        if rope_type_of(rope) == "proportional" and share:
            yield PRoPE(**own, fraction=share), *_scaling(rope, config, gains)
            continue
        if size == head_dim:
            position = RoPE(**own, direction="backward" if backward else "forward")
        else:
            own |= {"fraction": _fraction(size, head_dim)}
            position = PartialRoPE(**own, side="last" if rotation.start else "first")
        yield position, *_scaling(rope, config, gains)
        yield position, None, None


def _scaling(
    rope: Mapping[str, Any], config: Any, gains: tuple[float, ...]
) -> tuple[RopeScaling | None, int | None]:
    """The rope scaling that rope parameters name, with the length it counts within.

    YaRN's sharpness is a usual one where what multiplies q and k says so, else what that says.
    """
    length = rope.get("original_max_position_embeddings")
    length = length or getattr(config, "max_position_embeddings", None)
    kind, factor = rope_type_of(rope), float(rope.get("factor") or 1.0)
    if kind in ("linear", "proportional"):
        return (PI(factor=_nice(factor)) if _nice(factor) != 1 else None), None
    if kind == "llama3":
        low, high = (_nice(float(rope[f"{end}_freq_factor"])) for end in ("low", "high"))
        return Llama3(factor=_nice(float(rope["factor"])), low=low, high=high), length
    if kind != "yarn":
        return None, None
    sharpness, weights = 0.1, (rope.get("mscale"), rope.get("mscale_all_dim"))
    if factor > 1:
        if not gains:  # what transformers multiplies cos and sin with
            above, below = (0.1 * float(weight or 0) * math.log(factor) + 1 for weight in weights)
            amplitude = above / below if all(weights) else 0.1 * math.log(factor) + 1
            given = rope.get("attention_factor")
            gains = (amplitude if given is None else float(given),)
        measured = [round((gain - 1) / math.log(factor), 4) for gain in gains]
        usual = (0.1, 0.1 * float(weights[1] or 1.0))
        sharpness = next((one for one in usual if round(one, 4) in measured), measured[-1])
    ends = ("beta_fast", "beta_slow")
    yarn = YaRN(
        factor=_nice(factor),
        truncate=rope.get("truncate") is not False,
        sharpness=_nice(sharpness),
        **{name: _nice(float(rope[name])) for name in ends if rope.get(name)},
    )
    return yarn, length


def _fraction(size: int, head_dim: int) -> float:
    """A share of the head that `size` of its features are, as `PartialRoPE` rounds it."""
    exact = size / head_dim
    shares = (round(exact, 10), math.ceil(exact * 1e4) / 1e4, math.ceil(exact * 1e8) / 1e8)
    fits = (share for share in shares if PartialRoPE(fraction=share).rotary_dim(head_dim) == size)
    return next(fits, exact)


def _nice(value: float) -> float:
    """A number as a person would write it, where that is as close as was measured."""
    rounded = float(f"{value:.3g}")
    close = abs(rounded - value) <= 1e-3 * abs(value) and value > 100
    return rounded if close else round(value, 10)


def temperature(
    config: Any, rope: Mapping[str, Any], size: Float[Tensor, " t"], rotates: bool
) -> tuple[Temperature, ...] | None:
    """The position temperature of a layer, if it has one; None where its scale grows otherwise."""
    part, expected = None, torch.ones_like(size)
    if (beta := rope.get("llama_4_scaling_beta")) is not None:
        part = Temperature(beta=beta, length=rope.get("original_max_position_embeddings"))
    elif getattr(config, "attn_temperature_tuning", False) and not rotates:
        part = Temperature(beta=config.attn_scale, length=int(config.floor_scale), shift=1)
    if part is not None:
        expected = part.factor(torch.arange(1, size.numel() + 1, dtype=torch.float64), None)
    off = (size / size[0] - expected / expected[0]).abs().max()
    return None if float(off) >= 10 * CLOSE else () if part is None else (part,)


def _window_part(
    visible: Bool[Tensor, "t t"], named: SlidingWindow | Chunked | None
) -> SlidingWindow | Chunked | None:
    """The part that hides what the causal `visible` hides; None where no part does.

    A window that is longer than the tokens is the one that the configuration names.
    """
    positions = torch.arange(len(visible))
    distance = positions[:, None] - positions
    causal = distance >= 0
    if torch.equal(visible, causal):
        return named
    width = int(torch.where(visible, distance, 0).max()) + 1
    if torch.equal(visible, causal & (distance < width)):
        return SlidingWindow(window=width)
    sizes = range(2, len(visible))
    chunks = (
        s for s in sizes if torch.equal(visible, causal & (distance <= positions[:, None] % s))
    )
    size = next(chunks, None)
    return None if size is None else Chunked(size=size)


@dataclass(frozen=True)
class Gating:
    """The output gate's part and its logits (B, T, …); `lacks` is what is not understood."""

    part: Gate | None = None
    logits: Tensor | None = None
    lacks: str | None = None


def gating(layer: RecordedLayer) -> Gating:
    """What is between attention's output and the last projection."""
    out = layer.out.flatten(2)
    given = [x for x, _ in layer.projections if x.shape == out.shape]
    if any(torch.equal(candidate, out) for candidate in given):
        return Gating()
    (heads, size), d = layer.out.shape[2:], layer.q.shape[-1]
    for x, (_, made) in itertools.product(given, layer.projections):
        if made.shape[-1] == heads * (d + size):  # behind the queries of each head
            made = heads_of(made, d + size)[..., d:].transpose(1, 2).flatten(2)
        if made.shape[-1] not in (heads * size, heads):
            continue
        wide, wanted = made.shape[-1] // heads, x.double().view_as(layer.out)
        logits = made.double().reshape(*made.shape[:2], heads, wide)
        part = Gate(per="feature" if wide > 1 or size == 1 else "head")
        for act in (part, replace(part, act="softplus")):
            opened = logits.sigmoid() if act is part else F.softplus(logits)
            if float((opened * layer.out - wanted).abs().max()) <= CLOSE * float(
                wanted.abs().max()
            ):
                return Gating(act, logits.flatten(2))
    lacks = "its output is changed before the last projection in a way that no component describes"
    return Gating(lacks=lacks)


@dataclass(frozen=True)
class Masking:
    """The part that says which keys are hidden, None for none, and the mask that does the rest.

    `causal`: no query sees a later key. `operand` (B, H or 1, T, S) is the layer's own mask where
    it does more than `part` says, `beside` what that is, `lacks` what cannot be said of it.
    """

    part: SlidingWindow | Chunked | None = None
    causal: bool = True
    operand: Tensor | None = None
    beside: str | None = None
    lacks: str | None = None


def masking(layer: RecordedLayer, config: Any) -> Masking:
    """What the mask does, by what was recorded of it in texts that differ."""
    tokens, mask = layer.q.shape[2], layer.mask
    indexed = layer.more.get("indices") is not None
    few = f"its indexer leaves out none of {tokens} tokens: use more tokens" if indexed else None
    named = _named(layer, config)
    if mask is None:
        return Masking(causal=False, lacks=few)
    hides, part = hidden(mask), None
    same = bool((hides == hides[:1, :1]).all())  # in every text, from every head
    visible = ~hides[0, 0].cpu()
    causal = not bool(visible.triu(1).any())
    added = 0.0
    if mask.dtype != torch.bool:
        added = float(mask.masked_fill(hides, 0.0).abs().max())
    if causal and same:
        part = _window_part(visible, named)
    elif causal and isinstance(named, SlidingWindow) and named.window:
        at = torch.arange(mask.shape[3], device=mask.device)
        beyond = at[-mask.shape[2] :, None] - at >= named.window
        part = None if (~hides & beyond).any() else named
    if same and not added:
        return Masking(part, causal, lacks=few)
    # Whether what it hides, and what it adds, differs from text to text.
    hiding, adding = bool((hides != hides[:1]).any()), False
    if mask.dtype != torch.bool:
        both = ~hides & ~hides[:1]
        most, apart = (torch.where(both, x, 0.0).abs().max() for x in (mask, mask - mask[:1]))
        adding = bool(apart > _ROUNDED * most)
    beside: str | None = "its mask depends on the text (attn_mask)"
    lacks: str | None = None
    if not hiding and (indexed or not adding):
        beside = None
        lacks = few or "its mask does the same in every text, which no component describes"
    elif indexed and not adding:
        beside = "an indexer chooses the keys of each query (attn_mask)"
    if added and not adding:
        lacks = f"its mask adds up to {added:.2g} to a score, which no component describes"
    return Masking(part, causal, mask.cpu(), beside, lacks)


def _named(layer: RecordedLayer, config: Any) -> SlidingWindow | Chunked | None:
    """What hides keys by the layer's own words or the configuration's."""
    kind = layer_type(config, layer.index)
    if kind == "chunked_attention":
        return Chunked(size=config.attention_chunk_size)
    width = layer.more.get("sliding_window")
    if width is None and kind == "sliding_attention":
        width = config.sliding_window
    return None if width is None else SlidingWindow(window=int(width))
