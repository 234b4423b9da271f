"""What a configuration computes of positions, at a short, the trained and the longest length.

A small random model of the configuration is asked, so that the family's own code answers: dynamic
NTK and LongRoPE change frequencies with the length, DeepSeek's mscale changes the softmax scale,
and Llama 4's temperature grows with the position.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normattn.errors import InputError
from normattn.hf.model_parts import ModelParts, model_parts
from normattn.hf.probe import AttentionCall, Probed, ProbedLayer, probe, replay, short
from normattn.hf.rope_tables import read_tables, spectra_of
from normattn.hf.tiny_model import small_model

SHORT = 9
"""The tokens of a short text."""
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


Layers = dict[int, LayerValues]
Positions = dict[int, Layers]
"""By length, then by layer."""


def read_positions(config: Any, lengths: Sequence[int]) -> Positions:
    """What each layer of a configuration's model computes at each length.

    At the short length alone where no layer rotates. Raises `InputError` for a family that cannot
    be asked about positions further on.
    """
    parts = model_parts(small_model(config))
    probed = probe(parts)
    positions = {SHORT: _at(parts, probed, SHORT)}
    if rotates(positions):
        longer = sorted(length for length in set(lengths) if length > SHORT)
        positions |= {length: _at(parts, probed, length) for length in longer}
    return positions


def _at(parts: ModelParts, probed: Probed, length: int) -> Layers:
    calls = _calls(parts, probed, length)
    layers = {}
    for position, (module, one) in enumerate(probed.layers.items()):
        index = getattr(module, "layer_idx", None)
        if length > SHORT and module not in calls:
            raise InputError(f"{parts.name}: a layer is not called at {length:,} tokens")
        call = calls.get(module, one.call)
        frequencies, amplitude = _rotation(parts, one, length)
        given = call.more.get("scaling")
        scale = 1.0 if given is None else float(given)
        growth = float(call.query.norm() / one.call.query.norm())
        start = _rotation(parts, one, SHORT)[1]
        layers[index if isinstance(index, int) else position] = LayerValues(
            frequencies, amplitude, scale * growth * _undo(one, start, amplitude), _window(one.call)
        )
    return layers


def _undo(one: ProbedLayer, start: float, amplitude: float) -> float:
    """What takes the growth of the tables' amplitude out of that of the queries."""
    rotates = one.unrotated is not None and start > 0 and amplitude > 0
    return start / amplitude if rotates and start != amplitude else 1.0


def _window(call: AttentionCall) -> int | None:
    given = call.more.get("sliding_window")
    return int(given) if given is not None else call.window or None


def _calls(parts: ModelParts, probed: Probed, length: int) -> dict[nn.Module, AttentionCall]:
    """The layers' calls for the last tokens of a text of this length; none for a short text.

    Raises `InputError` for families that take no position ids.
    """
    if length <= SHORT:
        return {}
    try:
        calls, _ = replay(parts, probed, start=length - SHORT)
    except InputError:
        raise
    except Exception as error:  # a family whose forward takes no position ids, or not these
        raise InputError(
            f"{parts.name} cannot be asked what it computes at {length:,} tokens: its forward "
            f"rejects their position ids ({short(error)})"
        ) from error
    return {module: made[0] for module, made in calls.items()}


def _rotation(parts: ModelParts, one: ProbedLayer, length: int) -> tuple[Tensor | None, float]:
    """The frequencies and the amplitude of a layer's tables at a length."""
    if one.unrotated is None or torch.equal(one.unrotated.query, one.call.query):
        return None, 1.0
    if one.rotary is not None:
        made = _ask_rotary(*one.rotary, one.tables, length)
        if made is not None:
            return made
        if length > SHORT:
            raise InputError(
                f"{parts.name} cannot be asked what it computes at {length:,} tokens: its rotary "
                "module takes other arguments than a tensor, position ids and a type of layer"
            )
    tables = read_tables(one.tables, spectra_of(parts.model))
    return (None, 1.0) if tables is None else (tables.frequencies, tables.amplitude)


def _ask_rotary(
    rotary: nn.Module, kind: str, like: Any, length: int
) -> tuple[Tensor, float] | None:
    """What a rotary module holds once it has made the table of a text's last token."""
    first = like if isinstance(like, Tensor) else like[0]
    ids = torch.tensor([[length - 1]])
    try:
        made = rotary(torch.zeros(1, 1, 1, dtype=first.real.dtype), ids, *([kind] if kind else []))
    except Exception:  # another signature
        return None
    cos, sin = (made.real, made.imag) if isinstance(made, Tensor) else made
    held = getattr(rotary, f"{kind}_inv_freq", getattr(rotary, "inv_freq", None))
    if not isinstance(held, Tensor):
        return None
    amplitude = float((cos.double() ** 2 + sin.double() ** 2).flatten()[0] ** 0.5)
    return held.detach().double().cpu().flatten(), amplitude


def with_rotation(positions: Positions, layers: Mapping[int, tuple[Tensor, float]]) -> Positions:
    """The same positions with other frequencies and amplitudes in some layers, at all lengths."""
    return {
        length: {
            index: dataclasses.replace(
                values, frequencies=layers[index][0], amplitude=layers[index][1]
            )
            if index in layers
            else values
            for index, values in at.items()
        }
        for length, at in positions.items()
    }


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
    told: set[tuple[str, bool]] = set()
    for length in sorted(meant.keys() & given.keys()):
        for index, values in meant[length].items():
            within = values.window is not None
            for kind, sentence in _differ(values, given[length][index]):
                if (kind, within) not in told:
                    who = "layers within a window: " if within else ""
                    yield f"{who}{kind}: {sentence} (layer {index}, at {length:,} tokens)"
                told.add((kind, within))


def _differ(meant: LayerValues, given: LayerValues) -> Iterator[tuple[str, str]]:
    yield from _frequencies(meant.frequencies, given.frequencies)
    if _far(meant.amplitude, given.amplitude):
        yield (
            "attention factor",
            f"cos and sin times {given.amplitude:.5g} instead of {meant.amplitude:.5g}",
        )
    if _far(meant.scale, given.scale):
        yield "softmax scale", f"{given.scale:.5g} instead of {meant.scale:.5g}"
    if meant.window != given.window:
        yield "window", f"{given.window or 'none'} instead of {meant.window or 'none'}"


def _frequencies(meant: Tensor | None, given: Tensor | None) -> Iterator[tuple[str, str]]:
    if meant is None or given is None:
        if meant is not given:
            yield "rotary positions", "none" if given is None else "some instead of none"
        return
    if meant.shape != given.shape:
        yield (
            "rotary width",
            f"{2 * given.numel()} features rotate instead of {2 * meant.numel()}",
        )
        return
    largest = torch.maximum(meant.abs(), given.abs()).clamp(min=1e-30)
    off = (meant - given).abs() / largest
    if float(off.max()) > _CLOSE:
        pair = int(off.argmax())
        yield (
            "inverse frequencies",
            f"{int((off > _CLOSE).sum())} of {meant.numel()} differ, pair {pair} turns by "
            f"{float(given[pair]):.4g} a token instead of {float(meant[pair]):.4g}",
        )


def _far(one: float, other: float) -> bool:
    return abs(one - other) > 10 * _CLOSE * abs(one)
