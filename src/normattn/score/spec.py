"""`ScoreSpec`: how a query and a key become a score, as one value with a name.

The grammar is `PART(-PART)*(@L)?`, where a part is `Name` or `Name(field=value,…)`:

    KNA    CosA-logn-YaRN(factor=8)@512    Baseline-ReRoPE(window=128)-logn+@512

Names may be in any order. They are printed in the order of slots, `logn+` last.
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import core_schema

from normattn.errors import InputError
from normattn.score import parts as components
from normattn.score.grammar import agreed_length, build_parts, check_train_length, print_part, read
from normattn.score.parts import Part, Position, Slot, Variant, VORoPE
from normattn.score.parts.base import Parts, default_position, sort_parts
from normattn.score.parts.long_context import blockwise

P = typing.TypeVar("P", bound=Part)

UNMODIFIED = "unmodified"
"""The name of the model as trained among inference-time methods."""


def is_unmodified(method: str) -> bool:
    """Whether a method's name means the model as trained: "unmodified", "as is" or nothing."""
    return method.strip().lower() in ("", UNMODIFIED, "as is", "as-is")


@dataclass(frozen=True)
class PartAttribute(typing.Generic[P]):
    """An attribute of a `ScoreSpec`: the component that is a `part_class`, or None."""

    part_class: type[P]

    def __get__(self, spec: ScoreSpec, owner: type[ScoreSpec]) -> P | None:
        return next((part for part in spec.parts if isinstance(part, self.part_class)), None)


@dataclass(frozen=True)
class ScoreSpec:
    """The components of a score, one per type, and the training length.

    Each component type has an attribute, which holds its component or None. A parameter that
    depends on the training length or the extension factor may be open (None) before `resolve`.

    `leaks_future`: a normalisation uses the whole sequence, so the score cannot be causal.
    `blockwise`: the rotation of keys depends on the block of the query's row. `value_rope`: a score
    whose keys rotate like the values of `VORoPE`, or None.
    """

    parts: tuple[Part, ...]
    train_length: int | None = None
    variant: Variant = field(init=False, compare=False, repr=False)
    position: Position = field(init=False, compare=False, repr=False)
    leaks_future: bool = field(init=False, compare=False, repr=False, default=False)
    blockwise: bool = field(init=False, compare=False, repr=False, default=False)
    value_rope: ScoreSpec | None = field(init=False, compare=False, repr=False, default=None)

    logn = PartAttribute(components.LengthScaling)
    rope_scaling = PartAttribute(components.RopeScaling)
    remapping = PartAttribute(components.PositionRemapping)
    chunk_remapping = PartAttribute(components.ChunkRemapping)
    order = PartAttribute(components.RotateFirst)
    bias = PartAttribute(components.BiasPart)
    residual = PartAttribute(components.ResidualPart)
    cap = PartAttribute(components.SoftCap)
    sink = PartAttribute(components.Sink)
    normaliser = PartAttribute(components.NormaliserPart)
    selection = PartAttribute(components.Selective)
    difference = PartAttribute(components.Differential)
    values = PartAttribute(components.ValuePart)
    gate = PartAttribute(components.GatePart)
    documents = PartAttribute(components.Packed)
    layout = PartAttribute(components.Layout)
    _forgetting = PartAttribute(components.FoX)
    _sliding = PartAttribute(components.SlidingWindow)
    _chunked = PartAttribute(components.Chunked)

    def __post_init__(self) -> None:
        if not all(isinstance(part, Part) for part in self.parts):
            raise InputError(
                f"ScoreSpec takes components, not {self.parts!r}; ScoreSpec.parse takes a name"
            )
        stored = self.__dict__
        if self.train_length is not None:
            stored["train_length"] = check_train_length(self.train_length)
        parts = [part.filled(self.train_length, None) for part in sort_parts(self.parts)]
        stored["parts"] = tuple(parts)
        # Stored once, since every call of attention reads many of them.
        stored.update({name: getattr(self, name) for name in _PART_ATTRIBUTES})
        slots = {part.slot: part for part in parts}
        stored["variant"], stored["position"] = slots[Slot.VARIANT], slots[Slot.POSITION]
        norms = (self.variant.query_norm(), self.variant.key_norm())
        stored["leaks_future"] = any(norm is not None and norm.leaks_future for norm in norms)
        stored["blockwise"] = blockwise(slots) is not None
        _check_combination(self, slots)
        if isinstance(rope := self.values, VORoPE):
            stored["value_rope"] = ScoreSpec.parse(
                "Baseline-RoPE", base=rope.base, layout=rope.layout
            )

    @classmethod
    def parse(cls, text: str, train_length: int | None = None, **parameters: Any) -> ScoreSpec:
        """Parse a text. `train_length` is L if the text has no `@L`; otherwise they must agree.

        `parameters` (factor=, window=, base=, …) go to the component with that field, if the text
        does not set it. Raises `InputError` for unknown components (with the nearest names),
        unknown or unused parameters, values out of range, and components that cannot be combined.
        """
        named_parts, text_length = read(text)
        length = agreed_length(text, text_length, train_length)
        return cls(build_parts(named_parts, parameters, text), length)

    @property
    def name(self) -> str:
        """The label of the literature's tables, e.g. `CosA-logn-YaRN`."""
        return "-".join(part.name for part in self._named)

    @property
    def text(self) -> str:
        """The specification without its training length: `str(self)` up to the @."""
        return "-".join(print_part(part) for part in self._named)

    def __str__(self) -> str:
        return self.text if self.train_length is None else f"{self.text}@{self.train_length}"

    @property
    def block(self) -> tuple[str, int]:
        """The name of the component that makes the score blockwise, and the rows of a block."""
        part = self.chunk_remapping
        if part is not None:
            return part.name, part.required("size")
        assert self.rope_scaling is not None
        assert self.train_length is not None
        return self.rope_scaling.name, self.train_length

    @property
    def forgets(self) -> bool:
        """Whether there is a forget gate on the layer's input (`FoX`)."""
        return self._forgetting is not None

    @property
    def window(self) -> tuple[int | None, int]:
        """(w, sinks): hides keys with |i − j| ≥ w except the first `sinks`; w None hides none."""
        if self._sliding is not None:
            return self._sliding.window, 0
        return (None, 0) if self.remapping is None else self.remapping.visible_window()

    @property
    def chunk(self) -> int | None:
        """c: keys with ⌊i/c⌋ ≠ ⌊j/c⌋ are hidden; None hides none."""
        return None if self._chunked is None else self._chunked.size

    @property
    def needs_causal(self) -> bool:
        """Whether the score is defined for causal attention only."""
        return self.blockwise or any(part.needs_causal for part in self.parts)

    def layer(self, layer: int, layers: int) -> ScoreSpec:
        """The score of layer `layer` (0-based) of `layers`; self if no component depends on it."""
        if not 0 <= layer < layers:
            raise InputError(f"there is no layer {layer} among {layers}, which count from 0")
        parts: dict[Slot, Part] = {part.slot: part for part in self.parts}
        layer_parts: Iterable[Part] = self.parts
        if self.layout is not None:
            del parts[Slot.LAYOUT]
            layer_parts = self.layout.layer(parts, layer, layers, self.train_length)
        numbered = tuple(part.for_layer(layer) for part in layer_parts)
        return self if numbered == self.parts else ScoreSpec(numbered, self.train_length)

    @functools.lru_cache(maxsize=256)  # noqa: B019 (specifications are small values)
    def for_block(self, block: int) -> ScoreSpec:
        """The score of the query rows of a block, which may have its own frequencies."""
        if self.rope_scaling is None or not self.rope_scaling.blockwise:
            return self
        assert self.train_length is not None
        scaling = self.rope_scaling.for_block(block, self.train_length)
        parts = (scaling if part.slot is Slot.ROPE_SCALING else part for part in self.parts)
        return ScoreSpec(tuple(parts), self.train_length)

    @property
    def trained(self) -> ScoreSpec:
        """The training-time components, which the unmodified model computes."""
        parts = tuple(part for part in self.parts if part.when == "training-time")
        return ScoreSpec(parts, self.train_length)

    @property
    def variant_name(self) -> str:
        """The name of the training-time components with their values, e.g. `CosA(c=3.5)-logn`.

        Values that follow from the training length are left out.
        """
        return "-".join(self._print_short(part) for part in self.trained._named)

    @property
    def method(self) -> str:
        """The name of the inference-time components, e.g. `YaRN`; empty if there are none."""
        return "-".join(part.name for part in self._added)

    @property
    def method_name(self) -> str:
        """The name of the inference-time components with their values: `ReRoPE(window=16)-logn+`.

        Values that follow from the training length or the factor are left out.
        """
        return "-".join(self._print_short(part) for part in self._added)

    @property
    def method_text(self) -> str:
        """The inference-time components with every parameter, in the form `with_method` takes."""
        return "-".join(print_part(part) for part in self._added)

    def with_method(self, text: str, **parameters: Any) -> ScoreSpec:
        """This specification with the inference-time components of `text`; "unmodified" adds none.

        Raises `InputError` for a training-time component, which cannot be added afterwards.
        """
        if isinstance(text, str) and is_unmodified(text):
            return self
        named_parts, text_length = read(text)
        for part, _ in named_parts:
            if part.when == "training-time":
                raise InputError(
                    f"{part.name} is a training-time component; it cannot be added to {self.name}"
                )
        length = agreed_length(str(self), self.train_length, text_length)
        return ScoreSpec((*self.parts, *build_parts(named_parts, parameters, text)), length)

    def resolve(
        self, train_length: int | None = None, factor: float | int | None = None
    ) -> ScoreSpec:
        """Fill open parameters from the training length and the factor.

        Raises `InputError` if the training lengths differ, and if a parameter remains open.
        """
        length = agreed_length(str(self), self.train_length, train_length)
        factor = None if factor is None else float(factor)
        spec = ScoreSpec(tuple(part.filled(length, factor) for part in self.parts), length)
        for part in spec.parts:
            if name := part.missing(length):
                example = f": {spec!s}@512, say" if name == "train_length" else ""
                raise InputError(f"{part.name} in {str(spec)!r} needs {name}=…{example}")
        return spec

    @property
    def _named(self) -> tuple[Part, ...]:
        """The parts in the order of the name, without the default position; `logn+` is last."""
        default = default_position(part.slot for part in self.parts)
        named = [part for part in self.parts if part != default]
        return tuple(sorted(named, key=lambda x: (x.slot, x.when) == (Slot.LOGN, "inference-time")))

    @property
    def _added(self) -> tuple[Part, ...]:
        """The inference-time components, in the order of the name."""
        return tuple(part for part in self._named if part.when != "training-time")

    def _print_short(self, part: Part) -> str:
        """A part without the values that follow from the training length or its own factor."""
        factor = getattr(part, "factor", None)
        factor = factor if isinstance(factor, float) else None
        return print_part(part, type(part)().filled(self.train_length, factor))

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: type[Any], handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        """The schema of a field in a configuration, which is parsed from and saved as text."""
        return core_schema.no_info_plain_validator_function(
            as_spec, serialization=core_schema.to_string_ser_schema()
        )


def as_spec(value: Any) -> ScoreSpec:
    """Return a `ScoreSpec`, parsed if `value` is a name; `InputError` for any other type."""
    if not isinstance(value, ScoreSpec | str):
        raise InputError(f"a score is a ScoreSpec or its name, but {value!r} was given")
    return value if isinstance(value, ScoreSpec) else ScoreSpec.parse(value)


_PART_ATTRIBUTES = [name for name, x in vars(ScoreSpec).items() if isinstance(x, PartAttribute)]


def _check_combination(spec: ScoreSpec, slots: Parts) -> None:
    for part in spec.parts:
        if reason := part.conflict(slots):
            raise InputError(reason)
        if part.needs_rotary and not spec.position.rotary:
            why = f"{part.name} changes rotary positions, and {spec.name} has none"
            raise InputError(part.refusal(spec.bias or spec.position, why))
        if spec.layout is not None and not spec.layout.stretchable and part.when != "training-time":
            why = "most layers have a window, and the last has no position and its own log-n"
            raise InputError(part.refusal(spec.layout, why))
    if spec.needs_causal and spec.leaks_future:
        causal = next(
            part
            for part in spec.parts
            if part.needs_causal or (spec.blockwise and part.slot is Slot.ROPE_SCALING)
        )
        raise InputError(
            f"{spec.name} is not possible: {spec.variant.name} normalises across the sequence, "
            f"so it is not causal, but {causal.name} is defined for causal attention only"
        )
