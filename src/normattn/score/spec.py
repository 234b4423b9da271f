"""`ScoreSpec`: how a query and a key become a score, as one value with a name.

The grammar is `PART(-PART)*(@L)?`, a part being `Name` or `Name(field=value,…)`:

    KNA    CosA-logn-YaRN(factor=8)@512    Baseline-ReRoPE(window=128)-logn+@512

Names are read in any order and written in that of the slots, `logn+` last.
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
from normattn.score.grammar import agreed_length, build_parts, check_train_length, print_part, read
from normattn.score.parts import (
    BiasPart,
    Chunked,
    ChunkRemapping,
    Differential,
    FoX,
    GatePart,
    Layout,
    LengthScaling,
    NormaliserPart,
    Packed,
    Part,
    Position,
    PositionRemapping,
    ResidualPart,
    RopeScaling,
    RotateFirst,
    Selective,
    Sink,
    SlidingWindow,
    Slot,
    SoftCap,
    ValuePart,
    Variant,
    VORoPE,
)
from normattn.score.parts.base import arrange, default_position

P = typing.TypeVar("P", bound=Part)

UNMODIFIED = "unmodified"
"""The name of the model as trained among inference-time methods."""


def is_unmodified(method: str) -> bool:
    """Whether a method's name means the model as trained: "unmodified", "as is" or nothing."""
    return method.strip().lower() in ("", UNMODIFIED, "as is", "as-is")


@dataclass(frozen=True)
class InSlot(typing.Generic[P]):
    """An attribute of a `ScoreSpec`: what fills a slot, if it is of that kind, or None."""

    slot: Slot
    kind: type[P]

    def __get__(self, spec: ScoreSpec, owner: type[ScoreSpec]) -> P | None:
        part = next((part for part in spec.parts if part.slot is self.slot), None)
        return part if isinstance(part, self.kind) else None


@functools.cache
def _slots() -> tuple[str, ...]:
    """The attributes of a `ScoreSpec` that hold a component or None."""
    return tuple(name for name, slot in vars(ScoreSpec).items() if isinstance(slot, InSlot))


@dataclass(frozen=True)
class ScoreSpec:
    """The components of a score, one per type, and the training length.

    A parameter that depends on the training length or on the table's factor may still be open
    (None); `resolve` fills it and refuses what stays open. `leaks_future`: a normalisation uses the
    whole sequence (refused when causal). `blockwise`: the rotation of keys depends on the block of
    the query's row. `value_rope`: the score whose keys rotate as the values of `VORoPE` do. An
    attribute for each component type holds that component, or None.
    """

    parts: tuple[Part, ...]
    train_length: int | None = None
    leaks_future: bool = field(init=False, compare=False, repr=False, default=False)
    blockwise: bool = field(init=False, compare=False, repr=False, default=False)
    value_rope: ScoreSpec | None = field(init=False, compare=False, repr=False, default=None)

    logn = InSlot(Slot.LOGN, LengthScaling)
    rope_scaling = InSlot(Slot.ROPE_SCALING, RopeScaling)
    remapping = InSlot(Slot.REMAPPING, PositionRemapping)
    chunk_remapping = InSlot(Slot.REMAPPING, ChunkRemapping)
    order = InSlot(Slot.ORDER, RotateFirst)
    bias = InSlot(Slot.BIAS, BiasPart)
    residual = InSlot(Slot.RESIDUAL, ResidualPart)
    cap = InSlot(Slot.CAP, SoftCap)
    sink = InSlot(Slot.SINK, Sink)
    normaliser = InSlot(Slot.NORMALISER, NormaliserPart)
    selection = InSlot(Slot.NORMALISER, Selective)
    difference = InSlot(Slot.NORMALISER, Differential)
    values = InSlot(Slot.VALUES, ValuePart)
    gate = InSlot(Slot.GATE, GatePart)
    documents = InSlot(Slot.DOCUMENTS, Packed)
    layout = InSlot(Slot.LAYOUT, Layout)
    _variant = InSlot(Slot.VARIANT, Variant)
    _position = InSlot(Slot.POSITION, Position)
    _forgetting = InSlot(Slot.BIAS, FoX)
    _sliding = InSlot(Slot.WINDOW, SlidingWindow)
    _chunked = InSlot(Slot.WINDOW, Chunked)

    def __post_init__(self) -> None:
        if self.train_length is not None:
            object.__setattr__(self, "train_length", check_train_length(self.train_length))
        filled = (part.filled(self.train_length, None) for part in arrange(self.parts))
        object.__setattr__(self, "parts", tuple(filled))
        # Searched for once: a call of attention asks for many of them.
        self.__dict__.update({name: getattr(self, name) for name in _slots()})
        norms = (self.variant.query_norm(), self.variant.key_norm())
        leaks = any(norm is not None and norm.leaks_future for norm in norms)
        object.__setattr__(self, "leaks_future", leaks)
        scaling = self.rope_scaling
        blockwise = self.chunk_remapping is not None or (scaling is not None and scaling.blockwise)
        object.__setattr__(self, "blockwise", blockwise)
        _check_combination(self)
        if isinstance(self.values, VORoPE):
            values = self.values
            rope = ScoreSpec.parse("Baseline-RoPE", base=values.base, layout=values.layout)
            object.__setattr__(self, "value_rope", rope)

    @classmethod
    def parse(cls, text: str, train_length: int | None = None, **parameters: Any) -> ScoreSpec:
        """The specification that `text` names.

        `parameters` (factor=, window=, base=, …) go to the component that has such a field, if the
        text does not give it. Raises `InputError` for unknown components (with the nearest names),
        unknown or unused parameters, values out of range, and components that cannot be combined.
        """
        given, own = read(text)
        length = agreed_length(text, own, train_length)
        return cls(build_parts(given, parameters, text), length)

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
    def variant(self) -> Variant:
        """What is done to queries and keys, and the base of λ."""
        assert self._variant is not None
        return self._variant

    @property
    def position(self) -> Position:
        """The position, rotary or not."""
        assert self._position is not None
        return self._position

    @property
    def block(self) -> tuple[str, int]:
        """Where the score is `blockwise`: the part that makes it so, and the rows of a block."""
        part = self.chunk_remapping
        if part is not None:
            return part.name, part.known("size")
        assert self.rope_scaling is not None
        assert self.train_length is not None
        return self.rope_scaling.name, self.train_length

    @property
    def forgets(self) -> bool:
        """Whether a gate on the layer's input determines the bias."""
        return self._forgetting is not None

    @property
    def window(self) -> tuple[int | None, int]:
        """(w, kept): keys with i − j ≥ w are hidden but for the first `kept`; w None hides none."""
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
        """The score of layer `layer` (0-based) of a model of `layers`.

        The specification itself, unless a layout or another component depends on the layer's
        number.
        """
        parts: dict[Slot, Part] = {part.slot: part for part in self.parts}
        chosen: Iterable[Part] = self.parts
        if self.layout is not None:
            del parts[Slot.LAYOUT]
            chosen = self.layout.layer(parts, layer, layers, self.train_length)
        layer_parts = tuple(part.for_layer(layer) for part in chosen)
        return self if layer_parts == self.parts else ScoreSpec(layer_parts, self.train_length)

    @functools.lru_cache(maxsize=256)  # noqa: B019 (specifications are small values)
    def for_block(self, block: int) -> ScoreSpec:
        """The score of the rows of a block, whose frequencies are those of no other."""
        if self.rope_scaling is None or not self.rope_scaling.blockwise:
            return self
        assert self.train_length is not None
        own = self.rope_scaling.for_block(block, self.train_length)
        parts = (own if part.slot is Slot.ROPE_SCALING else part for part in self.parts)
        return ScoreSpec(tuple(parts), self.train_length)

    @property
    def trained(self) -> ScoreSpec:
        """The training-time components: what the unmodified model computes."""
        kept = tuple(part for part in self.parts if part.when == "training-time")
        return ScoreSpec(kept, self.train_length)

    @property
    def variant_name(self) -> str:
        """The name of the training-time components with chosen values, e.g. `CosA(c=3.5)-logn`.

        A value that the training length gives anyway is left out.
        """
        length = self.train_length
        return "-".join(
            print_part(part, type(part)().filled(length, None)) for part in self.trained._named
        )

    @property
    def method(self) -> str:
        """The name of the inference-time components, e.g. `YaRN`; empty if there are none."""
        return "-".join(part.name for part in self._added)

    @property
    def method_name(self) -> str:
        """The same with chosen values, e.g. `ReRoPE(window=16)-logn+`.

        A value that the training length or the factor gives anyway is left out.
        """
        labels = []
        for part in self._added:
            factor = getattr(part, "factor", None)
            usual = type(part)().filled(
                self.train_length, factor if isinstance(factor, float) else None
            )
            labels.append(print_part(part, usual))
        return "-".join(labels)

    @property
    def method_text(self) -> str:
        """The inference-time components with every parameter, as `with_method` takes them."""
        return "-".join(print_part(part) for part in self._added)

    def with_method(self, text: str, **parameters: Any) -> ScoreSpec:
        """This specification with the inference-time components of `text`; "unmodified" adds none.

        Raises `InputError` for a training-time component, which cannot be added afterwards.
        """
        if isinstance(text, str) and is_unmodified(text):
            return self
        given, own = read(text)
        for part, _ in given:
            if part.when == "training-time":
                raise InputError(
                    f"{part.name} is a training-time component; it cannot be added to {self.name}"
                )
        length = agreed_length(str(self), self.train_length, own)
        return ScoreSpec((*self.parts, *build_parts(given, parameters, text)), length)

    def resolve(
        self, train_length: int | None = None, factor: float | int | None = None
    ) -> ScoreSpec:
        """Fill what is open from the training length and the factor.

        Raises `InputError` if the training length contradicts the one it has, or if a component
        still lacks a value.
        """
        length = agreed_length(str(self), self.train_length, train_length)
        factor = None if factor is None else float(factor)
        spec = ScoreSpec(tuple(part.filled(length, factor) for part in self.parts), length)
        for part in spec.parts:
            if lack := part.missing(length):
                where = f": {spec!s}@512, say" if lack == "train_length" else ""
                raise InputError(f"{part.name} in {str(spec)!r} needs {lack}=…{where}")
        return spec

    @property
    def _named(self) -> tuple[Part, ...]:
        """The parts of a name, in its order: all but a position that is there by default.

        Log-n of a method is written after what it is added to: `ReRoPE-logn+`.
        """
        default = default_position(part.slot for part in self.parts)
        shown = (part for part in self.parts if part != default)
        late = Slot.LOGN
        return tuple(
            sorted(shown, key=lambda part: part.slot is late and part.when == "inference-time")
        )

    @property
    def _added(self) -> tuple[Part, ...]:
        """The inference-time ones of them."""
        return tuple(part for part in self._named if part.when != "training-time")

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: type[Any], handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        """A configuration field: read from the text or the value, written as the text."""
        return core_schema.no_info_plain_validator_function(
            as_spec, serialization=core_schema.to_string_ser_schema()
        )


def as_spec(value: Any) -> ScoreSpec:
    """`value` itself, or what it names; `InputError` for neither."""
    if not isinstance(value, ScoreSpec | str):
        raise InputError(f"a score is a ScoreSpec or its name, but {value!r} was given")
    return value if isinstance(value, ScoreSpec) else ScoreSpec.parse(value)


def _check_combination(spec: ScoreSpec) -> None:
    """Raise `InputError` for parts that cannot be combined."""
    slots = {part.slot: part for part in spec.parts}
    for part in spec.parts:
        if reason := part.conflict(slots):
            raise InputError(reason)
        if part.needs_rotary and not spec.position.rotary:
            position = spec.position.name if spec.bias is None else spec.bias.name
            raise InputError(
                f"{part.name} cannot be combined with {position}: {part.name} changes rotary "
                f"positions, and {spec.name} has none"
            )
        if spec.layout is not None and not spec.layout.stretchable and part.when != "training-time":
            raise InputError(
                f"{part.name} cannot be combined with {spec.layout.name}: all its layers but the "
                "last attend within a window, and the last has no rotary position and its own log-n"
            )
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
