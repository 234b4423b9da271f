"""What a configuration computes of positions, at a short, the trained and the longest length.

A small random model of the configuration is probed, so that the family's own code answers: dynamic
NTK and LongRoPE change frequencies with the length, DeepSeek's mscale changes the softmax scale,
and Llama 4's temperature grows with the position.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from normattn.hf.model_parts import ModelParts, explained, model_parts
from normattn.hf.probe import COUNT, AttentionCall, ProbedLayer, probe, replay
from normattn.hf.rope_detection import Spectrum, read_tables, spectra_of
from normattn.hf.tiny_model import small_model

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
