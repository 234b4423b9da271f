"""From what a layer was recorded to do, and what its configuration says, to the parts of its score.

The configuration proposes (bases, rope scaling, lengths that few tokens cannot show); what was
measured decides: a proposal that does not give the measured frequencies is none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from normattn.hf.model_parts import kind_of
from normattn.hf.score_fit import CLOSE, Rotation, plain_base
from normattn.score import ScoreSpec
from normattn.score.parts import Chunked, Part, RopeScaling, SlidingWindow
from normattn.score.parts.qk_norm import Baseline
from normattn.score.parts.rope import NoPE, PartialRoPE, PRoPE, RoPE, RotaryPosition
from normattn.score.parts.rope_scaling import PI, Llama3, YaRN
from normattn.score.parts.scale import Temperature
from normattn.score.rotary import frequencies

_STILL = 1e-7


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
        if kind_of(rope) == "proportional" and share:
            yield PRoPE(**own, fraction=share), _linear(rope), None
            continue
        if size == head_dim:
            position = RoPE(**own, direction="backward" if backward else "forward")
        else:
            own |= {"fraction": _fraction(size, head_dim)}
            position = PartialRoPE(**own, side="last" if rotation.start else "first")
        yield position, *_scaling(rope, config, gains)
        yield position, None, None


def _linear(rope: Mapping[str, Any]) -> PI | None:
    factor = _nice(float(rope.get("factor") or 1.0))
    return PI(factor=factor) if factor != 1 else None


def _scaling(
    rope: Mapping[str, Any], config: Any, gains: tuple[float, ...]
) -> tuple[RopeScaling | None, int | None]:
    """The rope scaling that rope parameters name, with the length it counts within."""
    length = rope.get("original_max_position_embeddings")
    length = length or getattr(config, "max_position_embeddings", None)
    kind = kind_of(rope)
    if kind == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor")
        factor, low, high = (_nice(float(rope[name])) for name in names)
        return Llama3(factor=factor, low=low, high=high), length
    if kind != "yarn":
        return (_linear(rope) if kind == "linear" else None), None
    factor = float(rope["factor"])
    turns = {
        name: _nice(float(rope[name])) for name in ("beta_fast", "beta_slow") if rope.get(name)
    }
    yarn = YaRN(
        factor=_nice(factor),
        truncate=rope.get("truncate") is not False,
        sharpness=_nice(_sharpness(gains or (_amplitude(rope, factor),), factor, rope)),
        **turns,
    )
    return yarn, length


def _sharpness(gains: tuple[float, ...], factor: float, rope: Mapping[str, Any]) -> float:
    """YaRN's by what multiplies q and k: a usual one if one of them says so, else the last."""
    if factor <= 1:
        return 0.1
    measured = [round((gain - 1) / math.log(factor), 4) for gain in gains]
    usual = (0.1, 0.1 * float(rope.get("mscale_all_dim") or 1.0))
    return next((one for one in usual if round(one, 4) in measured), measured[-1])


def _amplitude(rope: Mapping[str, Any], factor: float) -> float:
    """What transformers multiplies cos and sin with under YaRN."""
    if (given := rope.get("attention_factor")) is not None:
        return float(given)
    weights = rope.get("mscale"), rope.get("mscale_all_dim")
    above, below = (0.1 * float(weight or 0) * math.log(factor) + 1 for weight in weights)
    return above / below if all(weights) else 0.1 * math.log(factor) + 1


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


def window_part(
    visible: Bool[Tensor, "t t"], named: SlidingWindow | Chunked | None
) -> tuple[SlidingWindow | Chunked | None, str | None]:
    """The part that hides what `visible` hides, and what no part says; causal already.

    A window that is longer than the tokens is the one that the configuration names.
    """
    tokens = visible.shape[0]
    positions = torch.arange(tokens)
    distance = positions[:, None] - positions
    causal = distance >= 0
    if torch.equal(visible, causal):
        own = named.window if isinstance(named, SlidingWindow) else getattr(named, "size", None)
        seen = own is not None and own < tokens
        return (None, f"the window of {own} tokens hides nothing") if seen else (named, None)
    width = int(torch.where(visible, distance, 0).max()) + 1
    if torch.equal(visible, causal & (distance < width)):
        return SlidingWindow(window=width), None
    for size in range(2, tokens):
        if torch.equal(visible, causal & (positions[:, None] // size == positions // size)):
            return Chunked(size=size), None
    return None, "its mask is neither causal nor a window"
