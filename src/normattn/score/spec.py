"""`ScoreSpec`: how a query and a key become a score, as one value with a name.

The grammar is `PART(-PART)*(@L)?`, a part being `Name` or `Name(field=value,…)`:

    KNA    CosA-logn-YaRN(factor=8)@512    Baseline-logn+-ReRoPE(window=128)@512
"""

from __future__ import annotations

import dataclasses
import operator
import re
import types
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import GetCoreSchemaHandler
from pydantic_core import core_schema

from normattn.errors import InputError
from normattn.score.part import (
    LogNPart,
    Part,
    PositionPart,
    RegimePart,
    Slot,
    SpectrumPart,
    Variant,
)
from normattn.score.registry import find

_PART = re.compile(r"(?P<name>[A-Za-z][A-Za-z0-9_]*[+†]?)(?:\((?P<fields>[^()]*)\))?")
_LENGTH = re.compile(r"@(?P<length>[0-9]+)$")
_SPOKEN = {"NTK-mixed": "NTKMixed"}
_Given = tuple[type[Part], dict[str, Any]]


@dataclass(frozen=True)
class ScoreSpec:
    """An attention score: its parts, at most one per slot, and the training length L.

    Made by `ScoreSpec.parse`. A value that a part takes from the training length or from the
    table's factor may still be open (None); `resolve` fills it and refuses what stays open.
    """

    parts: tuple[Part, ...]
    train_length: int | None = None

    def __post_init__(self) -> None:
        if self.train_length is not None:
            object.__setattr__(self, "train_length", _length(self.train_length))
        object.__setattr__(self, "parts", _arrange(self.parts))
        filled = tuple(part.resolved(self.train_length, None) for part in self.parts)
        object.__setattr__(self, "parts", filled)
        _refuse_nonsense(self)

    @classmethod
    def parse(cls, text: str, train_length: int | None = None, **parameters: Any) -> ScoreSpec:
        """The specification that `text` names.

        `parameters` (factor=, window=, base=, …) go to the part that has such a field and was not
        given it in the text. Raises `InputError` for unknown parts (with the nearest names),
        unknown or unused parameters, values out of range and combinations without a sense.
        """
        given, length = _read(text)
        if None not in (length, train_length) and length != train_length:
            raise InputError(
                f"{text!r} says a training length of {length}, but {train_length} was given"
            )
        for key, value in parameters.items():
            _give(key, value, given, text)
        chosen = tuple(_make(part, fields, text) for part, fields in given)
        return cls(chosen, train_length if length is None else length)

    @property
    def name(self) -> str:
        """The label of the literature's tables, e.g. `CosA-logn-YaRN`."""
        return "-".join(_label(part) for part in self.parts if not _silent(part))

    def __str__(self) -> str:
        shown = "-".join(_print_part(part) for part in self.parts if not _silent(part))
        return shown if self.train_length is None else f"{shown}@{self.train_length}"

    @property
    def variant(self) -> Variant:
        """What is done to queries and keys, and the base of λ."""
        return typing.cast(Variant, self._slot(Slot.VARIANT))

    @property
    def logn(self) -> LogNPart | None:
        """Log-n scaling, trained or post-hoc."""
        return typing.cast(LogNPart | None, self._slot(Slot.LOGN))

    @property
    def position(self) -> PositionPart:
        """RoPE or NoPE."""
        return typing.cast(PositionPart, self._slot(Slot.POSITION))

    @property
    def spectrum(self) -> SpectrumPart | None:
        """Other frequencies after training."""
        return typing.cast(SpectrumPart | None, self._slot(Slot.SPECTRUM))

    @property
    def regime(self) -> RegimePart | None:
        """Two regimes of relative position."""
        return typing.cast(RegimePart | None, self._slot(Slot.REGIME))

    @property
    def leaks_future(self) -> bool:
        """Whether a normalisation reads across the sequence (refused when causal)."""
        norms = (self.variant.query_norm(), self.variant.key_norm())
        return any(norm is not None and norm.leaks_future for norm in norms)

    @property
    def needs_causal(self) -> bool:
        """Whether the score is defined for causal attention only."""
        return self.regime is not None

    @property
    def trained(self) -> ScoreSpec:
        """The parts that are trained in: what the model as it is computes."""
        kept = tuple(part for part in self.parts if part.when == "trained-in")
        return ScoreSpec(kept, self.train_length)

    @property
    def variant_name(self) -> str:
        """The name of the trained parts, e.g. `KNA-logn`."""
        return self.trained.name

    @property
    def method(self) -> str:
        """The name of the post-hoc parts, e.g. `YaRN`; empty when there are none."""
        return "-".join(_label(part) for part in self.parts if part.when != "trained-in")

    def with_method(self, text: str, **parameters: Any) -> ScoreSpec:
        """This specification with the post-hoc parts that `text` names; "" or "as is" adds none.

        Raises `InputError` for a part that is trained in: it cannot be added afterwards.
        """
        if text.strip() in ("", "as is"):
            return self
        given, length = _read(text)
        for part, _ in given:
            if part.when == "trained-in":
                raise InputError(f"{part.name} is trained in; it cannot be added to {self.name}")
        if None not in (length, self.train_length) and length != self.train_length:
            raise InputError(
                f"{text!r} says a training length of {length}, but {self} has another one"
            )
        for key, value in parameters.items():
            _give(key, value, given, text)
        added = tuple(_make(part, fields, text) for part, fields in given)
        return ScoreSpec(
            (*self.parts, *added), length if self.train_length is None else self.train_length
        )

    def resolve(
        self, train_length: int | None = None, factor: float | int | None = None
    ) -> ScoreSpec:
        """Fill what is open from the training length and the factor.

        Raises `InputError` when the training length contradicts the one it has, or when a part
        still misses something.
        """
        if None not in (self.train_length, train_length) and self.train_length != train_length:
            raise InputError(
                f"{self} is for a training length of {self.train_length}, but {train_length} was"
                " given"
            )
        length = train_length if self.train_length is None else self.train_length
        factor = None if factor is None else float(factor)
        spec = ScoreSpec(tuple(part.resolved(length, factor) for part in self.parts), length)
        for part in spec.parts:
            if lack := part.missing(length):
                raise InputError(
                    f"{part.name} in {str(spec)!r} needs {lack}=…, and nothing gives it"
                )
        return spec

    def _slot(self, slot: Slot) -> Part | None:
        return next((part for part in self.parts if part.slot is slot), None)

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: type[Any], handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        """A configuration field: read from the text or the value, written as the text."""
        return core_schema.no_info_plain_validator_function(
            _validate, serialization=core_schema.to_string_ser_schema()
        )


def as_spec(value: ScoreSpec | str) -> ScoreSpec:
    """`value` itself, or what it names."""
    return ScoreSpec.parse(value) if isinstance(value, str) else value


def _validate(value: Any) -> ScoreSpec:
    if isinstance(value, ScoreSpec | str):
        return as_spec(value)
    raise InputError(f"a score is a ScoreSpec or its name, but {value!r} was given")


def _silent(part: Part) -> bool:
    """Whether names leave the part out: RoPE as it is by default."""
    return part.name == "RoPE" and part == type(part)()


def _label(part: Part) -> str:
    return part.label or part.name


def _arrange(parts: Iterable[Part]) -> tuple[Part, ...]:
    """One part per slot, in the order of slots, RoPE where no position is named."""
    slots: dict[Slot, Part] = {}
    for part in parts:
        if part.slot in slots:
            first = slots[part.slot].name
            raise InputError(
                f"{first} and {part.name} cannot be combined: both choose the {part.slot}"
            )
        slots[part.slot] = part
    if Slot.VARIANT not in slots:
        raise InputError("a score needs a variant first, e.g. Baseline, KNA or CosA")
    slots.setdefault(Slot.POSITION, find("RoPE")())
    return tuple(slots[slot] for slot in Slot if slot in slots)


def _refuse_nonsense(spec: ScoreSpec) -> None:
    for part in spec.parts:
        if part.needs_rotary and not spec.position.rotary:
            raise InputError(
                f"{part.name} on {spec.position.name} makes no sense: {part.name} changes rotary "
                f"positions, and {spec.position.name} has none"
            )
    if spec.regime is not None and spec.spectrum is not None:
        raise InputError(
            f"{spec.regime.name} and {spec.spectrum.name} cannot be combined: {spec.regime.name} "
            "keeps every relative position inside the trained range, so nothing is left to stretch"
        )
    if spec.needs_causal and spec.leaks_future:
        raise InputError(
            f"{spec.name} makes no sense: {spec.variant.name} takes statistics across the sequence "
            "and so is not causal, and a second regime of positions is defined for causal "
            "attention only"
        )


def _length(value: Any) -> int:
    """A training length: a whole number of at least 2."""
    try:
        length = operator.index(value)
    except TypeError:
        length = 0
    if length < 2 or isinstance(value, bool):
        raise InputError(
            f"a training length must be a whole number of at least 2, but it is {value!r}"
        )
    return length


def _read(text: str) -> tuple[list[_Given], int | None]:
    """The parts that `text` names with the fields that it gives them, and its training length."""
    body, length = text.strip(), None
    if match := _LENGTH.search(body):
        body, length = body[: match.start()], int(match["length"])
    for spoken, name in _SPOKEN.items():
        body = re.sub(rf"{re.escape(spoken)}(?=$|[-(@])", name, body)
    return [_parse_part(match, text) for match in _split(body, text)], length


def _give(key: str, value: Any, given: list[_Given], text: str) -> None:
    """Hand a parameter to the one part that has such a field still open."""
    takers = [
        fields
        for part, fields in given
        if key in {field.name for field in dataclasses.fields(part)} and key not in fields
    ]
    if not takers:
        raise InputError(f"no part of {text!r} takes the parameter {key!r}, or it has it already")
    if len(takers) > 1:
        raise InputError(f"two parts of {text!r} take {key!r}: write it behind the one you mean")
    takers[0][key] = value


def _split(body: str, text: str) -> list[re.Match[str]]:
    found, start = [], 0
    while start < len(body):
        match = _PART.match(body, start)
        if match is None:
            break
        found.append(match)
        start = match.end()
        if start < len(body) and body[start] == "-" and start + 1 < len(body):
            start += 1
        elif start < len(body):
            break
    if start != len(body) or not found:
        near = body[start : start + 12]
        raise InputError(
            f"{text!r} is not a score: expected names joined by hyphens, like "
            f"CosA-logn-YaRN(factor=8)@512, but found {near!r}"
        )
    return found


def _parse_part(match: re.Match[str], text: str) -> _Given:
    part, fields = find(match["name"]), dict[str, Any]()
    for item in filter(None, (match["fields"] or "").split(",")):
        key, equals, value = (piece.strip() for piece in item.partition("="))
        if not equals or key in fields:
            raise InputError(f"{text!r}: {item.strip()!r} is not one new field=value")
        fields[key] = value
    return part, fields


def _make(part: type[Part], values: dict[str, Any], text: str) -> Part:
    hints = typing.get_type_hints(part)
    known = {field.name for field in dataclasses.fields(part)}
    for key in values:
        if key not in known:
            has = ", ".join(sorted(known)) or "no parameters"
            raise InputError(f"{text!r}: {part.name} has no parameter {key!r}; it has {has}")
    return part(**{key: _convert(hints[key], value, part, key) for key, value in values.items()})


def _convert(hint: Any, value: Any, part: type[Part], key: str) -> Any:
    """`value` as the field's type; text is read, numbers must be of the right kind."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        hint = next(choice for choice in typing.get_args(hint) if choice is not type(None))
    if typing.get_origin(hint) is Literal:
        if value in typing.get_args(hint):
            return value
        expected = " or ".join(repr(choice) for choice in typing.get_args(hint))
    elif hint is bool:
        if isinstance(value, bool) or value in ("true", "false"):
            return value if isinstance(value, bool) else value == "true"
        expected = "true or false"
    else:
        expected = "a whole number" if hint is int else "a number"
        try:
            number = float(value)
            if not isinstance(value, bool) and (hint is float or number == int(number)):
                return hint(number)
        except (TypeError, ValueError, OverflowError):
            pass
    raise InputError(f"{part.name}: {key} must be {expected}, but it is {value!r}")


def _print_part(part: Part) -> str:
    changed = [
        f"{field.name}={_print_value(getattr(part, field.name))}"
        for field in dataclasses.fields(part)
        if getattr(part, field.name) != field.default
    ]
    name = part.name
    return f"{name}({','.join(changed)})" if changed else name


def _print_value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return str(value)
