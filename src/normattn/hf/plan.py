"""Plan an extension: a method with all its values, for a model that was probed, not changed."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

from normattn.errors import InputError
from normattn.hf.model_parts import ModelParts, known_length, model_parts, refuse_moving
from normattn.hf.native import refuse_applied
from normattn.hf.probe import Probed, probe
from normattn.hf.rope_detection import Layer, detect_layers, refuse_absolute_positions
from normattn.score import ScoreSpec
from normattn.score.grammar import read as read_method
from normattn.score.parts.rope_scaling import PI

HANDLE = "normattn_extension"
INDICES = "indices"


class Plan(NamedTuple):
    """A method with all its values for a model that was asked, before anything is switched on.

    `source` says where the training length comes from.
    """

    parts: ModelParts
    layers: tuple[Layer, ...]
    spec: ScoreSpec
    source: str
    probed: Probed


def plan(model: Any, method: str, train_length: int | None = None, **parameters: Any) -> Plan:
    """What `extend` would do; the model is asked and not changed. Raises as `extend` does."""
    parts = model_parts(model)
    _refuse_twice(parts)
    refuse_applied(parts.model.config)
    spec, source = specify(parts, method, train_length, parameters)
    refuse_absolute_positions(parts)
    probed = probe(parts)
    layers = detect_layers(parts, probed.layers)
    _check(spec, layers, parts)
    return Plan(parts, layers, spec, source, probed)


def specify(
    parts: ModelParts, method: str, train_length: int | None, parameters: dict[str, Any]
) -> tuple[ScoreSpec, str]:
    """The method with its values filled in, and where the training length comes from."""
    if method.strip() in ("", "as is"):
        raise InputError("extend() needs a method by name, e.g. 'ReRoPE' or 'YaRN'")
    factor = _left_over(method, parameters)
    own = {name: value for name, value in parameters.items() if factor is None or name != "factor"}
    asked = ScoreSpec.parse("Baseline").with_method(method, **own)
    source = "given"
    length = asked.train_length if train_length is None else train_length
    if length is None:
        length, source = known_length(parts)
    spec = asked.resolve(length, factor)
    if factor is not None and ScoreSpec(asked.parts, length) == spec:
        raise InputError(f"{spec.method} takes no factor, or has what it would give already")
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


def _left_over(method: str, parameters: dict[str, Any]) -> float | None:
    """The stretch that no part holds as such: LeakyReRoPE and SelfExtend find theirs from it."""
    given, _ = read_method(method)
    named = {field.name for part, _ in given for field in dataclasses.fields(part)}
    factor = parameters.get("factor")
    if factor is None or "factor" in named:
        return None
    if isinstance(factor, bool) or not isinstance(factor, int | float) or factor < 1:
        raise InputError(f"factor must be a number of at least 1, but it is {factor!r}")
    return float(factor)


def _refuse_twice(parts: ModelParts) -> None:
    active = parts.decoder.__dict__.get(HANDLE)
    if active is not None:
        raise InputError(
            f"this model is already extended, by {active.spec.method}: remove() that first"
        )


def _check(spec: ScoreSpec, layers: tuple[Layer, ...], parts: ModelParts) -> None:
    served = [layer for layer in layers if layer.sliding is None]
    turned = [layer for layer in served if layer.rotation is not None]
    positions = spec.rope_scaling is not None or spec.remapping is not None or spec.blockwise
    if not served or (positions and not turned):
        why = (
            f"all its layers attend within a window of {layers[0].sliding} tokens"
            if not served
            else "none of its layers with full attention has rotary positions"
        )
        raise InputError(
            f"{parts.name} cannot be extended: {why}, so there is no position to extend"
        )
    refuse_moving(parts, [layer.module for layer in turned])
    gained = any(
        layer.rotation is not None and layer.rotation.gains is not None for layer in turned
    )
    if spec.chunk_remapping is not None and gained:
        raise InputError(
            f"{parts.name} gives rotated features gains of their own, so its scores depend on where"
            " a query and a key stand, not on their distance alone: "
            f"{spec.chunk_remapping.name} would change short texts too"
        )
    if spec.remapping is not None or spec.blockwise or spec.logn is not None:
        _check_attention(served, parts)
    if spec.rope_scaling is None or isinstance(spec.rope_scaling, PI):
        return
    for layer in turned:
        if layer.rotation is not None and layer.rotation.base is None:
            raise InputError(
                f"{parts.name} has rotary frequencies that are already scaled, and "
                f"{spec.rope_scaling.name} is defined on plain ones: PI, ReRoPE, LeakyReRoPE and "
                "SelfExtend take any"
            )


def _check_attention(served: list[Layer], parts: ModelParts) -> None:
    """Refuse layers whose attention ours cannot replace."""
    rest = "PI, NTK, NTK-mixed, ABF and YaRN leave its attention as it is"
    for layer in served:
        who = f"layer {layer.index} of {parts.name} ({type(layer.module).__name__})"
        unserved = [name for name in layer.unserved if name != INDICES]
        if unserved:
            raise InputError(
                f"{who} asks its attention for {', '.join(unserved)}, which ours does not "
                f"serve: {rest}"
            )


@dataclass(frozen=True)
class Resolved:
    """The values of an extension.

    Attributes:
        method: the method with all its parameters, e.g. `ReRoPE(window=2048)-logn+`.
        train_length: how far the model was trained to read.
        train_length_from: `given`, or the field of the configuration that said so.
        parameters: the method's parameters by name.
        base: the rotary base, or None where the frequencies are not powers of one.
        scaled: the kind of scaling that the model's own frequencies were trained with, if any; a
            method scales what is there.
        head_dim: features of a head.
        rotated: how many of them turn.
        layout: `half` or `interleaved`.
        extended: the numbers of the layers that the method changes.
        without_positions: layers among the model's that have no rotary position.
        left: layers that attend within a window, and stay as trained.
        attention: `stock`, or `normattn` where the layers attend by our kernels.
        cached_keys: `rotated`, or `un-rotated` where a cache must hold them so.
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

    def as_dict(self) -> dict[str, Any]:
        """The values by name."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        turned = f"{self.rotated} of {self.head_dim} features turn ({self.layout})"
        if self.scaled is not None:
            turned += f", on top of the model's own {self.scaled} scaling"
        lines = [
            f"{self.method}, trained to read {self.train_length} tokens ({self.train_length_from})",
            f"base {self.base:g}, {turned}" if self.base else turned,
            f"{len(self.extended)} layers extended; attention: {self.attention}; "
            f"cached keys: {self.cached_keys}",
        ]
        if self.without_positions:
            lines.append(f"layers without positions: {_numbers(self.without_positions)}")
        if self.left:
            lines.append(f"layers within a window, as trained: {_numbers(self.left)}")
        return "\n".join(lines)


def _numbers(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values))


def resolved_values(spec: ScoreSpec, source: str, layers: tuple[Layer, ...]) -> Resolved:
    """Every value of an extension; `source` says where the training length comes from."""
    served = [layer for layer in layers if layer.sliding is None]
    rotation = next((layer.rotation for layer in served if layer.rotation is not None), None)
    inside = spec.remapping is not None or spec.blockwise
    parts = [part for part in spec.parts if part.when != "trained-in"]
    own = inside or spec.logn is not None
    assert spec.train_length is not None
    return Resolved(
        method=spec.method_text,
        train_length=spec.train_length,
        train_length_from=source,
        parameters={
            field.name: getattr(part, field.name)
            for part in parts
            for field in dataclasses.fields(part)
        },
        base=None if rotation is None else rotation.base,
        scaled=None if rotation is None else rotation.scaled,
        head_dim=served[0].probed.call.query.shape[-1] if rotation is None else rotation.head_dim,
        rotated=0 if rotation is None else 2 * int((rotation.frequencies != 0).sum()),
        layout="interleaved" if rotation is not None and rotation.interleaved else "half",
        extended=tuple(x.index for x in served if x.rotation is not None),
        without_positions=tuple(x.index for x in served if x.rotation is None),
        left=tuple(x.index for x in layers if x.sliding is not None),
        attention="normattn" if own else "stock",
        cached_keys="un-rotated" if inside else "rotated",
    )
