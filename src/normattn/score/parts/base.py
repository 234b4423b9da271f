"""`Part`, a component of a score: a frozen value with a name, a slot and parameters.

The score of query i and key j (0-based) is

    s(i, j) = cap( λ(i) · ⟨ P_i N_q(q_i), P_j N_k(k_j) ⟩ + r(i, j) ) + b(i, j)

where r is the residual scores of the layers below. Softmax, or another normaliser, runs over the
keys that i sees and a sink. Every part fills one slot of the equation.

A new method is one class with `@register`, in its own file in `score/parts` or in any imported
file. Its parameters are fields; `number` and `one_of` declare their ranges and defaults.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import math
import pkgutil
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cache
from types import MappingProxyType
from typing import Any, ClassVar, Literal, TypeVar, dataclass_transform

from normattn.errors import InputError

When = Literal["training-time", "inference-time"]
Fill = Callable[[Any, int | None, float | None], Any]
"""(part, training length, extension factor) → the value of an open parameter, or None."""


class Slot(StrEnum):
    """The types of components, in the order in which a name prints them.

    `meaning` describes what the type decides, in the symbols of the score's equation.
    """

    meaning: str

    def __new__(cls, value: str, meaning: str) -> Slot:
        """A slot with its meaning."""
        slot = str.__new__(cls, value)
        slot._value_, slot.meaning = value, meaning
        return slot

    VARIANT = "variant", "N_q, N_k and the constant part of λ"
    LOGN = "logn", "how the scale λ grows with n or the position"
    ORDER = "order", "normalise after the rotation, N(P x)"
    POSITION = "position", "P, how positions rotate; RoPE if none is named"
    ROPE_SCALING = "rope scaling", "other rotary frequencies, at inference time"
    REMAPPING = "remapping", "other relative positions far away, at inference time"
    RESIDUAL = "residual", "r, what is added from the layers below"
    BIAS = "bias", "b, a bias by distance or by the tokens between"
    CAP = "cap", "a bound on the score: cap·tanh(s/cap)"
    SINK = "sink", "one more logit per head in the denominator"
    NORMALISER = "normaliser", "how a row of scores becomes weights; softmax if none is named"
    VALUES = "values", "how values, or the outputs computed from them, are transformed"
    GATE = "gate", "how the layer's input gates the outputs of heads"
    WINDOW = "window", "only keys within a window or chunk are visible"
    DOCUMENTS = "documents", "documents in one row do not see each other"
    LAYOUT = "layout", "different scores in different layers"


def number(
    *,
    default: Any,
    fill: Fill | None = None,
    optional: bool = False,
    above: float | int = -math.inf,
    least: float | int = -math.inf,
    below: float | int = math.inf,
    most: float | int = math.inf,
) -> Any:
    """Declare a field that is a finite number within bounds.

    A default of None leaves the field open until `fill` returns a value. A score with an open field
    raises an error, unless the field is `optional`.
    """

    def allowed(value: Any) -> bool:
        return math.isfinite(value) and above < value < below and least <= value <= most

    bounds = {"above": above, "of at least": least, "below": below, "at most": most}
    limits = " and ".join(f"{word} {end:g}" for word, end in bounds.items() if math.isfinite(end))
    expected = f"a number {limits}".strip()
    metadata = {"allowed": allowed, "expected": expected, "fill": fill, "optional": optional}
    return field(default=default, metadata=metadata)


def one_of(*values: Any, default: Any) -> Any:
    """Declare a field that is one of some values."""
    expected = " or ".join(map(repr, values))
    return field(default=default, metadata={"allowed": values.__contains__, "expected": expected})


def by_length(value: Callable[[int], int]) -> Fill:
    """A `fill` that depends on the training length only."""
    return lambda part, length, factor: None if length is None else value(length)


QUARTER_LENGTH = by_length(lambda length: max(1, length // 4))
"""Fill with a quarter of the training length."""
TRAIN_LENGTH = by_length(lambda length: length)
"""Fill with the training length."""


@dataclass(frozen=True)
class Part:
    """A component of a score specification; its fields are its parameters.

    Attributes:
        name, summary: by default the class name, and the first line of its docstring.
        used_by: well-known models.
        needs_causal: it is defined for causal attention only.
        needs_length: it uses the training length, even if all parameters are given.
        excludes: slots that must be empty, each with the reason. See also `conflict`.
    """

    name: ClassVar[str]
    slot: ClassVar[Slot]
    summary: ClassVar[str]
    equation: ClassVar[str]
    source: ClassVar[str]
    used_by: ClassVar[str] = ""
    when: ClassVar[When] = "training-time"
    needs_rotary: ClassVar[bool] = False
    needs_causal: ClassVar[bool] = False
    needs_length: ClassVar[bool] = False
    excludes: ClassVar[Mapping[Slot, str]] = MappingProxyType({})

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            allowed, value = item.metadata.get("allowed"), getattr(self, item.name)
            if allowed is not None and value is not None:
                self.require(allowed(value), item.name, item.metadata["expected"])

    def require(self, condition: bool, field: str, expected: str) -> None:
        """Raise `InputError` naming the part, the field, its value and what was expected."""
        if not condition:
            value = getattr(self, field)
            raise InputError(f"{self.name}: {field} must be {expected}, but it is {value}")

    def filled(self, train_length: int | None, factor: float | None) -> Part:
        """This part with open fields filled as far as possible."""
        part: Part = self
        for item in dataclasses.fields(self):
            fill = item.metadata.get("fill")
            if fill is not None and getattr(part, item.name) is None:
                value = fill(part, train_length, factor)
                part = part if value is None else replace(part, **{item.name: value})
        return part

    def missing(self, train_length: int | None) -> str | None:
        """The name of the first value that this part still needs, or None."""
        for item in dataclasses.fields(self):
            if getattr(self, item.name) is None and not item.metadata.get("optional"):
                return item.name
        return "train_length" if self.needs_length and train_length is None else None

    def required(self, name: str) -> Any:
        """The value of a field; `InputError` if it is open."""
        value = getattr(self, name)
        if value is None:
            raise InputError(f"{self.name} needs {name}=…")
        return value

    def required_length(self, train_length: int | None) -> int:
        """The training length; `InputError` if it is None."""
        if train_length is None:
            raise InputError(f"{self.name} needs the training length: {self.equation}")
        return train_length

    def for_layer(self, layer: int) -> Part:
        """This part in layer `layer` (0-based), for parts that depend on its number."""
        return self

    def conflict(self, parts: Parts) -> str | None:
        """Why this part cannot be combined with the other `parts` of a score; None if it can."""
        for slot, why in self.excludes.items():
            if slot in parts:
                return self.refusal(parts[slot], why)
        return None

    def refusal(self, other: Part, why: str) -> str:
        """The message that this part and another exclude each other."""
        return f"{self.name} cannot be combined with {other.name}: {why}"


Parts = Mapping[Slot, Part]
"""The parts of a score by slot."""
_PARTS: dict[str, type[Part]] = {}
P = TypeVar("P", bound=type[Part])


@dataclass_transform(frozen_default=True, field_specifiers=(field, number, one_of))
def register(part: P) -> P:
    """Class decorator: make a frozen dataclass, and register it under its name (no hyphens)."""
    attributes = part.__dict__
    if "name" not in attributes:
        part.name = part.__name__
    if "summary" not in attributes:
        part.summary = (part.__doc__ or "").partition("\n")[0].rstrip(".")
    if "-" in part.name:
        raise InputError(f"a component cannot be called {part.name!r}: hyphens join components")
    if part.name in _PARTS:
        raise InputError(
            f"a component {part.name} is registered already: choose another name, or restart Python"
        )
    for required in ("equation", "source"):
        if not hasattr(part, required):
            raise InputError(f"component {part.name} needs {required} = …, for `normattn list`")
    if "__dataclass_fields__" not in attributes:
        # `dataclass` changes the class in place.
        dataclass(frozen=True)(part)
    _PARTS[part.name] = part
    return part


@cache
def _discover() -> None:
    """Import every file of this folder, which registers their parts."""
    package = importlib.import_module("normattn.score.parts")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")


def parts() -> Mapping[str, type[Part]]:
    """All registered parts by name, ordered by slot and name."""
    _discover()
    slots = list(Slot)
    ordered = sorted(_PARTS.items(), key=lambda item: (slots.index(item[1].slot), item[0].lower()))
    return MappingProxyType(dict(ordered))


def find(name: str) -> type[Part]:
    """The part called `name`; for an unknown name `InputError` suggests the nearest ones."""
    _discover()
    if name in _PARTS:
        return _PARTS[name]
    lowered = {key.lower(): key for key in parts()}
    near = [lowered[key] for key in difflib.get_close_matches(name.lower(), lowered, 3, 0.5)]
    # Other names in the literature are in summaries: KeyNorm for KNA.
    word = re.compile(rf"\b{re.escape(name)}\b", re.IGNORECASE)
    in_summary = [
        key for key, part in parts().items() if word.search(part.summary) and key not in near
    ]
    exact = [lowered[name.lower()]] if name.lower() in lowered else []
    near = exact or [*in_summary[:1], *near]
    hint = f"; did you mean {' or '.join(near)}?" if near else ";"
    raise InputError(f"unknown component {name!r}{hint} `normattn list` shows all of them")


def sort_parts(parts: Iterable[Part]) -> tuple[Part, ...]:
    """Sort parts by slot, and add the default position if there is none.

    Raises `InputError` if two parts share a slot, or if there is no variant.
    """
    slots: dict[Slot, Part] = {}
    for part in parts:
        if part.slot in slots:
            raise InputError(slots[part.slot].refusal(part, f"both choose the {part.slot}"))
        slots[part.slot] = part
    if Slot.VARIANT not in slots:
        names = "-".join(part.name for part in slots.values())
        hint = f": write Baseline-{names}, say" if names else ", e.g. Baseline, KNA or CosA"
        raise InputError(f"a score needs a variant first{hint}")
    slots.setdefault(Slot.POSITION, default_position(slots))
    return tuple(slots[slot] for slot in Slot if slot in slots)


def default_position(slots: Iterable[Slot]) -> Part:
    """RoPE, or NoPE with a bias, which encodes position itself."""
    return find("NoPE" if Slot.BIAS in slots else "RoPE")()
