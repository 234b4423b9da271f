"""Check an extended model: no method is taken that has no effect, or breaks the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from normattn.errors import InputError
from normattn.hf.model_parts import explained
from normattn.hf.plan import Plan, replaces_attention, rotates_inside
from normattn.hf.probe import COUNT, EXACT, AttentionCall, replay
from normattn.hf.rope_detection import Layer, method_frequencies, method_gain
from normattn.score import ScoreSpec

_CLOSE, _HALF_CLOSE = 1e-3, 5e-2
"""How far numbers may be off, as a share of the largest: in full precision, and in half."""


def check_extension(plan: Plan) -> None:
    """Raise `InputError` unless every layer of the extended model does what the method means.

    The model reads the tokens of the probe once more, each layer on the input that it had there.
    Every layer must get the queries and keys that are meant, and the cache must keep those keys.
    Where a method promises to leave short texts alone, attention must give what it gave before.
    """
    name, spec = plan.parts.name, plan.spec
    cannot = f"{name} cannot be extended by {spec.method}"
    by_module = {layer.module: layer for layer in plan.layers}
    with explained(cannot, "since its forward then fails"):
        calls, cache = replay(plan.parts, by_module)
    rows = unchanged_rows(spec)
    for layer in plan.layers:
        made = calls.get(layer.module)
        if made is None or not _is_meant(made[0], layer, spec, by_module):
            raise InputError(
                f"layer {layer.index} of {name} ({type(layer.module).__name__}) does not get the "
                f"positions that {spec.method} means it to have, so it cannot be extended by it"
            )
        if layer.sliding is not None:
            continue
        if replaces_attention(spec) and not _is_cached(made[0], cache):
            raise InputError(
                f"{cannot}: a cache does not keep the keys that layer {layer.index} hands to its "
                "attention"
            )
        pairs = zip(made, layer.calls, strict=True)
        if not all(_alike(one.out[:, :rows], own.out[:, :rows]) for one, own in pairs):
            raise InputError(
                f"{cannot}: a short text, to which it promises no change, is read otherwise"
            )


def unchanged_rows(spec: ScoreSpec) -> int:
    """How many of the probe's tokens a method promises to leave alone; 0 where it promises none."""
    window = None if spec.remapping is None else spec.remapping.window
    near = spec.remapping is None or (window or 2) >= 2
    if not near or (spec.rope_scaling is not None and not spec.blockwise):
        return 0
    chunk = None if spec.chunk_remapping is None else spec.chunk_remapping.reach
    return max(2, min(x for x in (COUNT, window, chunk, spec.train_length) if x is not None))


def _is_meant(
    call: AttentionCall, layer: Layer, spec: ScoreSpec, layers: Mapping[nn.Module, Layer]
) -> bool:
    """Whether a layer hands to its attention the queries and keys that it should."""
    meant = layer.call.q, layer.call.k
    source = layer if layer.keys_of is None else layers[layer.keys_of]
    still, keys = layer.unrotated, source.unrotated
    changed = rotates_inside(spec) or spec.rope_scaling is not None
    if changed and layer.rotation is not None and layer.made_of is not None:
        if still is None or keys is None:
            return False
        meant = still.q, keys.k
        if not rotates_inside(spec):
            gained = layer.made_of.amplitude * method_gain(spec)
            how = replace(
                layer.rotation,
                frequencies=method_frequencies(spec, layer.rotation),
                amplitude=1.0 if layer.rotation.normed else gained,
            )
            meant = how.rotated(meant[0], 0), how.rotated(meant[1], 1)
    close = _CLOSE if call.q.dtype in EXACT else _HALF_CLOSE
    return all(
        one.shape == other.shape and bool((one - other).abs().max() <= close * other.abs().max())
        for one, other in zip((call.q, call.k), meant, strict=True)
    )


def _is_cached(call: AttentionCall, cache: Any) -> bool:
    """Whether the cache keeps the keys that attention was given; True where it keeps none such.

    A layer that runs several times in a forward has an entry for each run.
    """
    entries = (getattr(entry, "keys", None) for entry in getattr(cache, "layers", None) or ())
    alike = [keys for keys in entries if isinstance(keys, Tensor) and keys.shape == call.k.shape]
    close = _CLOSE * call.k.abs().max()
    return not alike or any(bool((keys - call.k).abs().max() <= close) for keys in alike)


def _alike(mine: Tensor, own: Tensor) -> bool:
    """Whether each row of attention's output is what it was, up to rounding; True for no rows.

    In half precision the median of the rows, where rounding may move one far.
    """
    if mine.shape != own.shape or not own.numel():
        return mine.shape == own.shape
    off = (mine.double() - own.double()).norm(dim=-1) / own.double().norm(dim=-1).clamp(min=1e-30)
    if own.dtype in EXACT:
        return bool(off.max() <= 10 * _CLOSE)
    return bool(off.median() <= 4 * _HALF_CLOSE)
