"""Plan an extension: resolve a method, probe the model, and detect how its layers rotate heads."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from normattn.errors import InputError
from normattn.hf.model_parts import ModelParts, known_length, model_parts
from normattn.hf.native import refuse_applied
from normattn.hf.probe import KNOWN_ARGUMENTS, Layer, probe, spectra_of
from normattn.hf.rotations import (
    FULL_PRECISION,
    EmbeddingTables,
    HeadRotation,
    RotaryLayout,
    fit_rotation,
    read_tables,
)
from normattn.score import ScoreSpec
from normattn.score.grammar import read as read_method
from normattn.score.parts import rope_frequencies
from normattn.score.parts.rope_scaling import PI
from normattn.score.spec import is_unmodified

HANDLE = "normattn_extension"
_SCALABLE_TYPES = ("linear", "llama3")
_DYNAMIC = {
    "dynamic": "set its rope_type to 'default' and take DynamicNTK",
    "longrope": "its frequencies change with the length of the text, and a cache then holds keys "
    "of both kinds",
}


def rotates_inside(spec: ScoreSpec) -> bool:
    """Whether a method rotates queries and keys inside normattn's attention."""
    return spec.remapping is not None or spec.blockwise


def replaces_attention(spec: ScoreSpec) -> bool:
    """Whether the method replaces the model's attention function."""
    return rotates_inside(spec) or spec.logn is not None


@dataclass(frozen=True)
class Resolved:
    """The values of an extension.

    Attributes:
        method: the method with all its parameters, e.g. `ReRoPE(window=2048)-logn+`.
        train_length: the training length of the model.
        train_length_from: `given`, or the field of the configuration that has it.
        parameters: the method's parameters by name.
        base: the rotary base, or None where the frequencies are not powers of one.
        scaled: the rope type that the model's frequencies were trained with, if any; a method
            scales them once more.
        head_dim, rotated: features of a head, and how many of them rotate.
        layout: `half` or `interleaved`.
        extended: the numbers of the rotary layers, which the method changes.
        without_positions: layers without rotary positions, which only logn+ changes.
        left: layers with a sliding window, which stay as trained.
        attention: `stock`, or `normattn` where normattn's kernels compute it.
        cached_keys: `rotated`, or `unrotated` where the method rotates inside attention.
    """

    method: str
    train_length: int
    train_length_from: str
    parameters: dict[str, Any]
    base: float | None
    scaled: str | None
    head_dim: int
    rotated: int
    layout: str
    extended: tuple[int, ...]
    without_positions: tuple[int, ...]
    left: tuple[int, ...]
    attention: str
    cached_keys: str

    def __str__(self) -> str:
        rotated = f"{self.rotated} of {self.head_dim} features rotate ({self.layout})"
        if self.scaled is not None:
            rotated += f", on top of the model's own {self.scaled} scaling"
        lines = [
            f"{self.method}, trained on {self.train_length} tokens ({self.train_length_from})",
            f"base {self.base:g}, {rotated}" if self.base else rotated,
            f"{len(self.extended)} layers extended; attention: {self.attention}; "
            f"cached keys: {self.cached_keys}",
        ]
        for title, numbers in (
            ("layers without positions", self.without_positions),
            ("layers within a window, as trained", self.left),
        ):
            lines += [f"{title}: {', '.join(map(str, numbers))}"] if numbers else []
        return "\n".join(lines)


class Plan(NamedTuple):
    """A method with all its values for a probed model."""

    parts: ModelParts
    layers: tuple[Layer, ...]
    spec: ScoreSpec
    source: str  # where the training length comes from

    @property
    def full_layers(self) -> list[Layer]:
        """The layers without a sliding window."""
        return [layer for layer in self.layers if layer.sliding_window is None]

    @property
    def resolved(self) -> Resolved:
        """Every value."""
        spec, full = self.spec, self.full_layers
        rotated = [layer for layer in full if layer.rotation is not None]
        rotation = rotated[0].rotation if rotated else None
        parts = [part for part in spec.parts if part.when != "training-time"]
        assert spec.train_length is not None
        return Resolved(
            method=spec.method_text,
            train_length=spec.train_length,
            train_length_from=self.source,
            parameters={
                field.name: getattr(part, field.name)
                for part in parts
                for field in dataclasses.fields(part)
            },
            base=None if rotation is None else rotation.base,
            scaled=None if rotation is None else rotation.scaled,
            head_dim=full[0].call.q.shape[-1],
            rotated=0 if rotation is None else 2 * int((rotation.frequencies != 0).sum()),
            layout="interleaved" if rotation and rotation.layout.interleaved else "half",
            extended=tuple(layer.index for layer in rotated),
            without_positions=tuple(layer.index for layer in full if layer.rotation is None),
            left=tuple(layer.index for layer in self.layers if layer.sliding_window is not None),
            attention="normattn" if replaces_attention(spec) else "stock",
            cached_keys="unrotated" if rotates_inside(spec) else "rotated",
        )


def plan(model: Any, method: str, train_length: int | None = None, **parameters: Any) -> Plan:
    """Plan an extension; the model is probed and not changed. Raises as `extend` does."""
    parts = model_parts(model)
    active = parts.decoder.__dict__.get(HANDLE)
    if active is not None:
        raise InputError(
            f"this model is already extended, by {active.spec.method}: remove() that extension "
            "first"
        )
    refuse_applied(parts.model.config)
    spec, source = _resolve_method(parts, method, train_length, parameters)
    if not has_rotary_module(parts.model):
        raise InputError(f"{parts.name} is not a rotary model of transformers")
    layers = probe(parts)
    _detect_layers(parts, layers)
    planned = Plan(parts, tuple(layers), spec, source)
    _refuse_unsupported(planned)
    return planned


def _resolve_method(
    parts: ModelParts, method: str, train_length: int | None, parameters: dict[str, Any]
) -> tuple[ScoreSpec, str]:
    """The method with its values filled in, and the source of the training length."""
    if is_unmodified(method):
        raise InputError("extend() needs a method by name, e.g. 'ReRoPE' or 'YaRN'")
    # LeakyReRoPE and SelfExtend have no `factor` themselves, but derive their values from one.
    factor, parameters = None, dict(parameters)
    parts_read, _ = read_method(method)
    fields = (field.name for part, _ in parts_read for field in dataclasses.fields(part))
    if "factor" not in fields:
        factor = parameters.pop("factor", None)
    invalid = isinstance(factor, bool) or not isinstance(factor, int | float | None)
    if factor is not None and (invalid or not 1 <= factor < math.inf):
        raise InputError(f"factor must be a number of at least 1, but it is {factor!r}")
    unresolved = ScoreSpec.parse("Baseline").with_method(method, **parameters)
    length = unresolved.train_length if train_length is None else train_length
    length, source = (length, "given") if length is not None else known_length(parts)
    spec = resolve_with_factor(unresolved, length, factor)
    if spec.window[0] is not None:
        raise InputError(
            f"{spec.method} hides keys, and a cache of transformers keeps them all: use a cache "
            "that drops them instead"
        )
    window = None if spec.remapping is None else spec.remapping.window
    if window is not None and window > length:
        raise InputError(
            f"{spec.method}: window={window} is larger than the training length of {length}: "
            "positions beyond it were never trained"
        )
    return spec, source


def resolve_with_factor(
    spec: ScoreSpec, train_length: int | None, factor: float | None
) -> ScoreSpec:
    """`spec.resolve`; `InputError` if a factor is given that changes nothing."""
    resolved = spec.resolve(train_length, factor)
    if factor is not None and ScoreSpec(spec.parts, train_length) == resolved:
        raise InputError(f"{resolved.method} takes no factor, or its parameter is given already")
    return resolved


def _refuse_unsupported(planned: Plan) -> None:
    name, spec, scaling = planned.parts.name, planned.spec, planned.spec.rope_scaling
    full = planned.full_layers
    rotated = [(x.module, x.rotation) for x in full if x.rotation is not None]
    if not full or ((scaling is not None or rotates_inside(spec)) and not rotated):
        why = "none of its layers with full attention has rotary positions"
        if not full:
            window = planned.layers[0].sliding_window
            why = f"all its layers attend within a window of {window} tokens"
        raise InputError(f"{name} cannot be extended: {why}, so there is no position to extend")
    for module, rotation in rotated:
        rope_type = planned.parts.rope(module).get("rope_type")
        if rope_type in _DYNAMIC:
            raise InputError(
                f"{name} has a {rope_type} rotary spectrum already: {_DYNAMIC[rope_type]}"
            )
        if spec.chunk_remapping is not None and rotation.gains is not None:
            raise InputError(
                f"{name} multiplies rotated features by learned gains, so its scores depend on "
                "the positions of query and key, not only on their distance: "
                f"{spec.chunk_remapping.name} would change short texts too"
            )
        if scaling is not None and not isinstance(scaling, PI) and rotation.base is None:
            raise InputError(
                f"{name} has rotary frequencies that are already scaled, and {scaling.name} "
                "needs unscaled ones: use PI, ReRoPE, LeakyReRoPE or SelfExtend"
            )
    for layer in full if replaces_attention(spec) else ():
        kwargs = layer.call.kwargs
        used = {name for name, x in kwargs.items() if x is not None and x is not False}
        unsupported = sorted(used - KNOWN_ARGUMENTS - {"indices"})
        # As in transformers, the layer's attribute is the default of the argument.
        causal = kwargs.get("is_causal")
        if (getattr(layer.module, "is_causal", True) if causal is None else causal) is False:
            unsupported.append("is_causal=False")
        if unsupported:
            raise InputError(
                f"layer {layer.index} of {name} ({type(layer.module).__name__}) asks its "
                f"attention for {', '.join(unsupported)}, which normattn does not support: "
                "use PI, NTK, NTK-mixed, ABF or YaRN, which keep the model's attention"
            )


def _detect_layers(parts: ModelParts, layers: Sequence[Layer]) -> None:
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
    sources = (x.unrotated for x in (layer, *layers) if torch.equal(x.call.k, call.k))
    keys = (x.k for x in sources if x is not None and not torch.equal(x.k, call.k))
    k = next(keys, None)
    layer.rotation = None if k is None else _find_rotation(parts, layer, tables, (unrotated.q, k))
    if layer.rotation is None:
        raise InputError(
            f"{name} does not rotate the first or the last features of its queries and keys as "
            "RoPE does, so its positions cannot be replaced"
        )


def _find_rotation(
    parts: ModelParts, layer: Layer, tables: EmbeddingTables, unrotated: tuple[Tensor, Tensor]
) -> HeadRotation | None:
    """The rotation by these tables of the first or the last features; None where none fits."""
    assert layer.doubled is not None
    theta, plain, d = tables.frequencies, unrotated[0], unrotated[0].shape[-1]
    size, full = 2 * theta.numel(), plain.dtype in FULL_PRECISION
    if size > d or d != unrotated[1].shape[-1]:
        return None
    # Without a norm, some feature of every token and head doubles with its position embeddings.
    doubles = (layer.doubled.q - 2 * plain).abs() <= (1e-3 if full else 2e-2) * plain.abs()
    normed = not (doubles & (plain != 0)).flatten(0, 2).all(0).any()
    amplitude, tolerance = 1.0 if normed else tables.amplitude, 1e-3 if full else 5e-2
    for start, interleaved in itertools.product(sorted({0, d - size}), (False, True)):
        layout = RotaryLayout(size, start, interleaved)
        q, k = (
            fit_rotation(before, after, layout, theta, normed, tolerance)
            for before, after in zip(unrotated, (layer.call.q, layer.call.k), strict=True)
        )
        if q is None or k is None or not torch.equal(q.frequencies, k.frequencies):
            continue
        error = max(float((x.amplitude - amplitude).abs().max()) for x in (q, k))
        if error <= tolerance * amplitude:
            base, scaled = _find_base(parts, layer.module, theta)
            gains = None if q.gain is None or k.gain is None else (q.gain, k.gain)
            known = tables, unrotated, q.frequencies
            return HeadRotation(*known, base, layout, amplitude, d, scaled, gains)
    return None


def _find_base(
    parts: ModelParts, module: nn.Module, theta: Tensor
) -> tuple[float | None, str | None]:
    """The base of frequencies, and the rope type of their scaling, if any.

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
