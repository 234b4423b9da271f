"""Detect how each layer of a probed model rotates its heads, or say in an error why not."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from normattn.errors import InputError
from normattn.hf.model_parts import ModelParts
from normattn.hf.probe import Layer, rotary_buffers
from normattn.hf.rotations import (
    FULL_PRECISION,
    EmbeddingTables,
    HeadRotation,
    RotaryLayout,
    Spectrum,
    fit_rotation,
    read_tables,
)
from normattn.score.parts import rope_frequencies

_SCALABLE_TYPES = ("linear", "llama3")


def spectra_of(model: nn.Module) -> list[Spectrum]:
    """The spectrum of each frequency buffer in a model."""
    return [
        (
            module._buffers[name].detach().double().cpu().flatten(),  # type: ignore[union-attr]
            float(getattr(module, f"{name.removesuffix('inv_freq')}attention_scaling", 1.0)),
        )
        for module in model.modules()
        for name in rotary_buffers(module)
    ]


def detect_layers(parts: ModelParts, layers: Sequence[Layer]) -> None:
    """Detect each layer's rotation; raises `InputError` for a layer that is not understood."""
    if not layers:
        raise InputError(
            f"{parts.name} uses its own attention code: no layer takes its attention function "
            "from transformers' AttentionInterface, so its rotary positions cannot be changed"
        )
    spectra, formats = spectra_of(parts.model), dict[int, EmbeddingTables | None]()
    for layer in layers:  # layers share their tables
        rotated = layer.unrotated is not None and layer.sliding_window is None
        if rotated and id(layer.tables) not in formats:
            formats[id(layer.tables)] = read_tables(layer.tables, spectra)
    for layer in layers:
        _detect(parts, layer, formats.get(id(layer.tables)), layers)


def has_rotary_module(model: nn.Module) -> bool:
    """Whether a module has rotary positions, by the names of its parts in transformers."""
    names = [name for name, _ in (*model.named_modules(), *model.named_buffers())]
    has_field = any(hasattr(x, "rotary_dim") or hasattr(x, "rotary") for x in model.modules())
    named = any(name.endswith("inv_freq") or "rotary" in name for name in names)
    return named or has_field or "RoFormer" in type(model).__name__


def _detect(
    parts: ModelParts, layer: Layer, tables: EmbeddingTables | None, layers: Sequence[Layer]
) -> None:
    name = f"layer {layer.index} of this model ({type(layer.module).__name__})"
    call, unrotated = layer.call, layer.unrotated
    if call.k.shape[2] != call.q.shape[2]:
        raise InputError(
            f"{name} reads {call.k.shape[2]} keys of {call.q.shape[2]} tokens: they are "
            "compressed or come from another layer, so their positions are not known"
        )
    if layer.sliding_window is not None:
        return
    if unrotated is None:
        if has_rotary_module(layer.module):
            raise InputError(
                f"{name} computes its rotary positions internally, where they cannot be replaced"
            )
        return
    if torch.equal(unrotated.q, call.q) and torch.equal(unrotated.k, call.k):
        return
    if tables is None:
        raise InputError(
            f"{name} gets position embeddings that are not computed from rotary frequencies of "
            "the model, so they cannot be replaced"
        )
    # A layer without own keys reads those of the first layer with equal ones.
    equal = (other for other in layers if torch.equal(other.call.k, call.k))
    keys = next((other for other in (layer, *equal) if _rotates_keys(other)), None)
    rotation = None if keys is None else _find_rotation(parts, layer, keys, tables)
    if rotation is None:
        raise InputError(
            f"{name} does not rotate the first or the last features of its queries and keys as "
            "RoPE does, so its positions cannot be replaced"
        )
    layer.rotation, layer.table_format, layer.key_source = rotation, tables, keys


def _rotates_keys(layer: Layer) -> bool:
    return layer.unrotated is not None and not torch.equal(layer.unrotated.k, layer.call.k)


def _find_rotation(
    parts: ModelParts, layer: Layer, keys: Layer, tables: EmbeddingTables
) -> HeadRotation | None:
    """The rotation by these tables of the first or the last features; None where none fits."""
    assert layer.unrotated is not None
    assert layer.doubled is not None
    assert keys.unrotated is not None
    theta, d = tables.frequencies, layer.unrotated.q.shape[-1]
    size = 2 * theta.numel()
    if size > d or d != keys.unrotated.k.shape[-1]:
        return None
    normed = not _scales_with_tables(layer.unrotated.q, layer.doubled.q)
    amplitude = 1.0 if normed else tables.amplitude
    tolerance = 1e-3 if layer.call.q.dtype in FULL_PRECISION else 5e-2
    for start, interleaved in itertools.product(sorted({0, d - size}), (False, True)):
        layout = RotaryLayout(size, start, interleaved)
        q = fit_rotation(layer.unrotated.q, layer.call.q, layout, theta, normed, tolerance)
        k = fit_rotation(keys.unrotated.k, keys.call.k, layout, theta, normed, tolerance)
        if q is None or k is None or not torch.equal(q.frequencies, k.frequencies):
            continue
        error = max(float((x.amplitude - amplitude).abs().max()) for x in (q, k))
        if error <= tolerance * amplitude:
            base, scaled = _find_base(parts, layer.module, theta)
            gains = None if q.gain is None or k.gain is None else (q.gain, k.gain)
            return HeadRotation(q.frequencies, base, layout, amplitude, d, scaled, gains)
    return None


def _scales_with_tables(plain: Tensor, doubled: Tensor) -> bool:
    """Whether some feature of every token and head doubles with its position embeddings."""
    tolerance = 1e-3 if plain.dtype in FULL_PRECISION else 2e-2
    doubles = (doubled - 2 * plain).abs() <= tolerance * plain.abs()
    return bool((doubles & (plain != 0)).flatten(0, 2).all(0).any())


def _find_base(
    parts: ModelParts, module: nn.Module, theta: Tensor
) -> tuple[float | None, str | None]:
    """The base of frequencies, and the rope type of their scaling, if any.

    Unscaled frequencies are powers of a base that the configuration names, or 0 from some pair on.
    Scaled ones have a base only for types that a method can scale once more.
    """
    rope = parts.rope(module)
    candidates = [rope.get("rope_theta"), *(other.get("rope_theta") for other in parts.ropes)]
    by_layer: Any = getattr(parts.config, "layer_rope_theta", None)
    candidates += list(by_layer) if isinstance(by_layer, list | tuple) else []
    count = int((theta != 0).sum())
    for base in dict.fromkeys(float(value) for value in candidates if value and value > 1):
        unscaled = rope_frequencies(2 * theta.numel(), base)
        if torch.allclose(theta[:count], unscaled[:count], rtol=2e-2, atol=0):
            return base, None
    rope_type = rope.get("rope_type")
    if rope_type in _SCALABLE_TYPES and rope.get("rope_theta"):
        return float(rope["rope_theta"]), str(rope_type)
    return None, None if rope_type is None else str(rope_type)
