"""Verify an extended model: no method is taken that has no effect, or breaks the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from normattn.errors import InputError, NormattnError
from normattn.hf.model_parts import ModelParts
from normattn.hf.probe import COUNT, AttentionCall, Probed, replay, short
from normattn.hf.rope_detection import Layer
from normattn.hf.rotation_fit import rotated_by
from normattn.hf.rotation_tables import method_frequencies
from normattn.score import ScoreSpec

_CLOSE, _HALF_CLOSE = 1e-3, 5e-2
"""How far numbers may be off, as a share of the largest: in full precision, and in half."""


def verify_extension(
    parts: ModelParts, layers: Sequence[Layer], spec: ScoreSpec, probed: Probed
) -> None:
    """Raise `InputError` unless every layer of the extended model does what the method means.

    The model reads the tokens of the probe once more, each layer on the input that it had there.
    Every layer must get the queries and keys that are meant, and the cache must keep those keys.
    Where a method promises to leave short texts alone, attention must give what it gave before.
    """
    try:
        calls, cache = replay(parts, probed)
    except NormattnError:
        raise
    except Exception as error:
        raise InputError(
            f"{parts.name} cannot be extended by {spec.method}: its forward then fails "
            f"({short(error)})"
        ) from error
    by_module = {layer.module: layer for layer in layers}
    own_attention = spec.remapping is not None or spec.blockwise or spec.logn is not None
    for layer in layers:
        call = calls.get(layer.module, [None])[0]
        if call is None or not _is_meant(call, layer, spec, by_module):
            raise InputError(
                f"layer {layer.index} of {parts.name} ({type(layer.module).__name__}) does not get "
                f"the positions that {spec.method} means it to have, so it cannot be extended by it"
            )
        if layer.sliding is None and own_attention and not _is_cached(call, cache):
            raise InputError(
                f"{parts.name} cannot be extended by {spec.method}: a cache does not keep the keys "
                f"that layer {layer.index} hands to its attention"
            )
    rows = unchanged_rows(spec)
    own = [layer for layer in layers if layer.sliding is None] if rows else []
    for layer in own:
        pairs = zip(calls[layer.module], probed.outputs[layer.module], strict=True)
        if not all(_alike(call.output[:, :rows], before[:, :rows]) for call, before in pairs):
            raise InputError(
                f"{parts.name} cannot be extended by {spec.method}: a short text, to which it "
                "promises no change, is read otherwise"
            )


def unchanged_rows(spec: ScoreSpec) -> int:
    """How many of the probe's tokens a method promises to leave alone; 0 where it promises none."""
    near = spec.remapping is None or (spec.remapping.window or 2) >= 2
    if not near or (spec.rope_scaling is not None and not spec.blockwise):
        return 0
    bounds = [COUNT]
    if spec.remapping is not None and spec.remapping.window is not None:
        bounds.append(spec.remapping.window)
    if spec.chunk_remapping is not None:
        bounds.append(spec.chunk_remapping.reach)
    if spec.train_length is not None:
        bounds.append(spec.train_length)
    return max(2, min(bounds))


def _is_meant(
    call: AttentionCall, layer: Layer, spec: ScoreSpec, layers: Mapping[nn.Module, Layer]
) -> bool:
    """Whether a layer hands to its attention the queries and keys that it should."""
    own = layer.probed.call
    if layer.rotation is None or not (spec.remapping or spec.rope_scaling or spec.blockwise):
        meant: tuple[Tensor, Tensor] | None = own.query, own.key
    else:
        meant = _meant(layer, spec, layer if layer.keys_of is None else layers[layer.keys_of])
    if meant is None:
        return False
    close = _CLOSE if _exact(own.query) else _HALF_CLOSE
    pairs = zip((call.query, call.key), meant, strict=True)
    return all(
        one.shape == other.shape and bool((one - other).abs().max() <= close * other.abs().max())
        for one, other in pairs
    )


def _meant(layer: Layer, spec: ScoreSpec, source: Layer) -> tuple[Tensor, Tensor] | None:
    """The queries and keys that a layer should hand over; keys are its source's."""
    one, keys = layer.probed.unrotated, source.probed.unrotated
    if one is None or keys is None or layer.rotation is None or layer.tables is None:
        return None
    if spec.remapping is not None or spec.blockwise:
        return one.query, keys.key
    assert spec.rope_scaling is not None
    gain = spec.rope_scaling.gain(spec.train_length) ** 0.5
    other = replace(
        layer.rotation,
        frequencies=method_frequencies(spec, layer.rotation),
        amplitude=1.0 if layer.rotation.normed else layer.tables.amplitude * gain,
    )
    of_query, of_key = other.gains or (None, None)
    return rotated_by(other, one.query, of_query), rotated_by(other, keys.key, of_key)


def _is_cached(call: AttentionCall, cache: Any) -> bool:
    """Whether the cache keeps the keys that attention was given; True where it keeps none such.

    A layer that runs several times in a forward has an entry for each run.
    """
    entries = (getattr(entry, "keys", None) for entry in getattr(cache, "layers", None) or ())
    alike = [keys for keys in entries if isinstance(keys, Tensor) and keys.shape == call.key.shape]
    close = _CLOSE * call.key.abs().max()
    return not alike or any(bool((keys - call.key).abs().max() <= close) for keys in alike)


def _alike(mine: Tensor, own: Tensor) -> bool:
    """Whether each row of attention's output is what it was, up to rounding.

    In half precision the median of the rows, where rounding may move one far.
    """
    if mine.shape != own.shape:
        return False
    off = (mine.double() - own.double()).norm(dim=-1) / own.double().norm(dim=-1).clamp(min=1e-30)
    return bool(off.max() <= 10 * _CLOSE if _exact(own) else off.median() <= 4 * _HALF_CLOSE)


def _exact(x: Tensor) -> bool:
    return x.dtype in (torch.float32, torch.float64)
