"""Plan an extension: resolve a method's values for a model that is probed but not changed."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from normattn.errors import InputError
from normattn.hf.model_parts import ModelParts, known_length, model_parts, refuse_length_dependent
from normattn.hf.native import refuse_applied
from normattn.hf.probe import Layer, probe
from normattn.hf.rope_detection import detect_layers, has_rotary_module
from normattn.score import ScoreSpec
from normattn.score.grammar import read as read_method
from normattn.score.parts.rope_scaling import PI
from normattn.score.spec import is_unmodified

HANDLE = "normattn_extension"


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
    """A method with all its values for a probed model.

    `source` says where the training length comes from.
    """

    parts: ModelParts
    layers: tuple[Layer, ...]
    spec: ScoreSpec
    source: str

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
    detect_layers(parts, layers)
    planned = Plan(parts, tuple(layers), spec, source)
    _refuse_unsupported(planned)
    return planned


def _resolve_method(
    parts: ModelParts, method: str, train_length: int | None, parameters: dict[str, Any]
) -> tuple[ScoreSpec, str]:
    """The method with its values filled in, and the source of the training length.

    LeakyReRoPE and SelfExtend have no `factor` themselves, but derive their values from one.
    """
    if is_unmodified(method):
        raise InputError("extend() needs a method by name, e.g. 'ReRoPE' or 'YaRN'")
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
    spec = unresolved.resolve(length, factor)
    if factor is not None and ScoreSpec(unresolved.parts, length) == spec:
        raise InputError(f"{spec.method} takes no factor, or its parameter is given already")
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
        refuse_length_dependent(planned.parts, module)
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
    for layer in full:
        if replaces_attention(spec) and layer.unsupported:
            raise InputError(
                f"layer {layer.index} of {name} ({type(layer.module).__name__}) asks its "
                f"attention for {', '.join(layer.unsupported)}, which normattn does not support: "
                "use PI, NTK, NTK-mixed, ABF or YaRN, which keep the model's attention"
            )
