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

from normattn.hf.score_fit import CLOSE, Rotation, plain_base
from normattn.score import ScoreSpec
from normattn.score.parts.rope import PartialRoPE
from normattn.score.rotary import frequencies

_STILL = 1e-7


def position_words(
    rotation: Rotation,
    rope: Mapping[str, Any],
    config: Any,
    head_dim: int,
    gains: tuple[float, ...],
) -> tuple[str, int | None] | None:
    """Position and rope scaling as parts, with the length that they need; None where none fits.

    `gains` are what the rotation may multiply q and k with by what was measured; none where that
    cannot be told.
    """
    if float(rotation.theta.abs().max()) < _STILL:
        return "NoPE", None
    still = head_dim // 2 - rotation.theta.numel()
    measured = torch.nn.functional.pad(rotation.theta, (0, still))
    for position, scaling, length in _proposals(rotation, rope, config, head_dim, gains):
        words = "-".join(filter(None, (position, scaling)))
        spec = ScoreSpec.parse(f"Baseline-{words}" if words else "Baseline", train_length=length)
        named = frequencies(spec, head_dim)
        named = torch.nn.functional.pad(named, (0, head_dim // 2 - named.numel()))
        off = float((measured - named).abs().max()) * (rotation.size.numel() - 1)
        if off < 10 * CLOSE:
            return words, length
    return None


def _proposals(
    rotation: Rotation,
    rope: Mapping[str, Any],
    config: Any,
    head_dim: int,
    gains: tuple[float, ...],
) -> Iterator[tuple[str, str, int | None]]:
    """What the configuration says, then a plain row of frequencies that fits."""
    size = 2 * rotation.theta.numel()
    share = rope.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None)
    layout = "layout=interleaved" if rotation.interleaved else ""
    backward = float(rotation.theta[0]) < 0
    bases = (rope.get("rope_theta"), plain_base(-rotation.theta if backward else rotation.theta))
    for base in filter(None, bases):
        named = f"base={_nice(float(base))}" if float(base) != 10000 else ""
        if rope.get("rope_type") == "proportional" and share:
            yield _part("PRoPE", named, layout, f"fraction={share}"), _linear(rope), None
            continue
        fields = (named, layout, "direction=backward" if backward else "")
        position = _part("RoPE", *fields) if any(fields) else ""
        if size != head_dim:
            side = "side=last" if rotation.start else ""
            position = _part("PartialRoPE", named, layout, _fraction(size, head_dim), side)
        yield position, *_scaling(rope, config, gains)
        yield position, "", None


def _part(name: str, *fields: str) -> str:
    inside = ",".join(filter(None, fields))
    return f"{name}({inside})" if inside else name


def _linear(rope: Mapping[str, Any]) -> str:
    factor = float(rope.get("factor") or 1.0)
    return f"PI(factor={_nice(factor)})" if factor != 1 else ""


def _scaling(
    rope: Mapping[str, Any], config: Any, gains: tuple[float, ...]
) -> tuple[str, int | None]:
    """The rope scaling that rope parameters name, with the length it counts within."""
    kind = rope.get("rope_type") or rope.get("type") or "default"
    length = rope.get("original_max_position_embeddings")
    length = length or getattr(config, "max_position_embeddings", None)
    if kind == "linear":
        return _linear(rope), None
    if kind == "llama3":
        names = {"factor": "factor", "low": "low_freq_factor", "high": "high_freq_factor"}
        fields = (f"{name}={_nice(float(rope[theirs]))}" for name, theirs in names.items())
        return _part("Llama3", *fields), length
    if kind != "yarn":
        return "", None
    factor = float(rope["factor"])
    given = [f"factor={_nice(factor)}"]
    given += ["truncate=false"] if rope.get("truncate") is False else []
    for name, usual in (("beta_fast", 32.0), ("beta_slow", 1.0)):
        if (value := rope.get(name)) not in (None, usual):
            given.append(f"{name}={_nice(float(value))}")
    sharpness = _sharpness(gains or (_amplitude(rope, factor),), factor, rope)
    given += [f"sharpness={_nice(sharpness)}"] if sharpness != 0.1 else []
    return _part("YaRN", *given), length


def _sharpness(gains: tuple[float, ...], factor: float, rope: Mapping[str, Any]) -> float:
    """YaRN's by what multiplies q and k: a usual one if one of them says so, else the last."""
    if factor <= 1:
        return 0.1
    told = [round((gain - 1) / math.log(factor), 4) for gain in gains]
    usual = (0.1, 0.1 * float(rope.get("mscale_all_dim") or 1.0))
    return next((one for one in usual if round(one, 4) in told), told[-1])


def _amplitude(rope: Mapping[str, Any], factor: float) -> float:
    """What transformers multiplies cos and sin with under YaRN."""
    if (told := rope.get("attention_factor")) is not None:
        return float(told)
    weights = rope.get("mscale"), rope.get("mscale_all_dim")
    above, below = (0.1 * float(weight or 0) * math.log(factor) + 1 for weight in weights)
    return above / below if all(weights) else 0.1 * math.log(factor) + 1


def _fraction(size: int, head_dim: int) -> str:
    """A share of the head that `size` of its features are, as `PartialRoPE` rounds it."""
    exact = size / head_dim
    shares = (round(exact, 10), math.ceil(exact * 1e4) / 1e4, math.ceil(exact * 1e8) / 1e8)
    fits = (share for share in shares if PartialRoPE(fraction=share).rotary_dim(head_dim) == size)
    return f"fraction={_nice(next(fits, exact))}"


def _nice(value: float) -> str:
    """A number as a person would write it, where that is as close as was measured."""
    rounded = float(f"{value:.3g}")
    value = rounded if abs(rounded - value) <= 1e-3 * abs(value) and value > 100 else value
    return str(int(value)) if value == int(value) else repr(round(value, 10))


def temperature_words(
    config: Any, rope: Mapping[str, Any], size: Float[Tensor, " t"], rotates: bool
) -> str | None:
    """The position temperature of a layer, "" where it has none, None where it is another."""
    words, expected = "", torch.ones_like(size)
    if rope.get("llama_4_scaling_beta") is not None:
        length = rope.get("original_max_position_embeddings")
        words = f"Temperature(beta={rope['llama_4_scaling_beta']},length={length})"
    elif getattr(config, "attn_temperature_tuning", False) and not rotates:
        words = f"Temperature(beta={config.attn_scale},length={config.floor_scale},shift=1)"
    logn = ScoreSpec.parse(f"Baseline-{words}" if words else "Baseline").logn
    if logn is not None:
        expected = logn.factor(torch.arange(1, size.numel() + 1, dtype=torch.float64), None)
    off = (size / size[0] - expected / expected[0]).abs().max()
    return words if float(off) < 10 * CLOSE else None


def window_words(visible: Bool[Tensor, "t t"], named: str) -> tuple[str, str | None]:
    """The part that hides what `visible` hides, and what no part says; causal already.

    A window that is longer than the tokens is that of the configuration, `named`, a part or "".
    """
    tokens = visible.shape[0]
    positions = torch.arange(tokens)
    distance = positions[:, None] - positions
    causal = distance >= 0
    if torch.equal(visible, causal):
        seen = named and int(named.partition("=")[2].rstrip(")")) < tokens
        return ("", f"{named} hides nothing") if seen else (named, None)
    width = int(torch.where(visible, distance, 0).max()) + 1
    if torch.equal(visible, causal & (distance < width)):
        return f"SlidingWindow(window={width})", None
    for size in range(2, tokens):
        if torch.equal(visible, causal & (positions[:, None] // size == positions // size)):
            return f"Chunked(size={size})", None
    return "", "its mask is neither causal nor a window"
