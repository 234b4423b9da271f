"""What a part of a score is: a frozen value with a name, a slot and parameters, declared once.

The score of query i and key j (0-based) is

    s(i, j) = cap( λ(i) · ⟨ P_i N_q(q_i), P_j N_k(k_j) ⟩ + r(i, j) ) + b(i, j)

with r the residual scores of the layers below, and softmax, or another normaliser, runs over the
keys that i may see, and over a sink where there is one. Every part fills one slot of it.

A new method is one class with `@register`, in its own file in `score/parts` or anywhere that is
imported. Its parameters are fields; `number` and `one_of` declare their ranges and what fills them
where nobody gave them.
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

When = Literal["training-time", "inference-time", "either"]
Fill = Callable[[Any, int | None, float | None], Any]
"""What an open parameter of a part becomes, by the training length and a table's factor."""


class Slot(StrEnum):
    """The places of a specification, in the order in which a name prints them.

    `meaning` says what a part in the slot decides, in the symbols of the equation of a score.
    """

    meaning: str

    def __new__(cls, value: str, meaning: str) -> Slot:
        """The slot of that name."""
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
    """A field that is a finite number within the bounds.

    A default of None is open: `fill` gives the value (or None, as long as it cannot), and a score
    is refused while it lacks one, unless the field is `optional`.
    """

    def allowed(value: Any) -> bool:
        return math.isfinite(value) and above < value < below and least <= value <= most

    bounds = {"above": above, "of at least": least, "below": below, "at most": most}
    named = " and ".join(f"{word} {end:g}" for word, end in bounds.items() if math.isfinite(end))
    expected = f"a number {named}".strip()
    metadata = {"allowed": allowed, "expected": expected, "fill": fill, "optional": optional}
    return field(default=default, metadata=metadata)


def one_of(*values: Any, default: Any) -> Any:
    """A field that is one of some values."""
    expected = " or ".join(map(repr, values))
    return field(default=default, metadata={"allowed": values.__contains__, "expected": expected})


def by_length(value: Callable[[int], int]) -> Fill:
    """A `fill` by the training length alone."""
    return lambda part, length, factor: None if length is None else value(length)


A_QUARTER = by_length(lambda length: max(1, length // 4))
"""The fill of a window: a quarter of the training length."""
THE_LENGTH = by_length(lambda length: length)
"""The training length itself."""


@dataclass(frozen=True)
class Part:
    """One named choice of a score specification; its fields are its parameters.

    The name is that of the class, and the summary the first line of its docstring, where a class
    gives no others. `used_by` names well-known models. `excludes` says for each slot that a part
    leaves empty why; `conflict` does where that depends on values. `needs_causal`: it is defined
    for causal attention only. `needs_length`: the training length is used even where all parameters
    are given.
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
        """This part with its open fields filled, as far as their `fill` can."""
        part: Part = self
        for item in dataclasses.fields(self):
            fill = item.metadata.get("fill")
            if fill is not None and getattr(part, item.name) is None:
                value = fill(part, train_length, factor)
                part = part if value is None else replace(part, **{item.name: value})
        return part

    def missing(self, train_length: int | None) -> str | None:
        """The name of a value that this part needs and does not have, or None."""
        for item in dataclasses.fields(self):
            if getattr(self, item.name) is None and not item.metadata.get("optional"):
                return item.name
        return "train_length" if self.needs_length and train_length is None else None

    def known(self, name: str) -> Any:
        """The value of a field that must be filled by now; `InputError` where it is not."""
        value = getattr(self, name)
        if value is None:
            raise InputError(f"{self.name} needs {name}=…")
        return value

    def known_length(self, train_length: int | None) -> int:
        """The training length, which must be known by now; `InputError` where it is not."""
        if train_length is None:
            raise InputError(f"{self.name} needs the training length: {self.equation}")
        return train_length

    def for_layer(self, layer: int) -> Part:
        """This part in layer `layer` (0-based), with what it takes from its number filled in."""
        return self

    def conflict(self, parts: Parts) -> str | None:
        """Why this part cannot be combined with the others of a score; None if it can."""
        for slot, why in self.excludes.items():
            if slot in parts:
                return self.refusal(parts[slot], why)
        return None

    def refusal(self, other: Part, why: str) -> str:
        """The sentence that this part and another exclude each other."""
        return f"{self.name} and {other.name} cannot be combined: {why}"


Parts = Mapping[Slot, Part]
"""The parts of a score by slot."""
_PARTS: dict[str, type[Part]] = {}
P = TypeVar("P", bound=type[Part])


@dataclass_transform(frozen_default=True, field_specifiers=(field, number, one_of))
def register(part: P) -> P:
    """Make a class a frozen dataclass and a part known under its name, which holds no hyphen."""
    own = part.__dict__
    if "name" not in own:
        part.name = part.__name__
    if "summary" not in own:
        part.summary = (part.__doc__ or "").partition("\n")[0].rstrip(".")
    if "-" in part.name or part.name in _PARTS:
        raise ValueError(f"part name {part.name!r} holds a hyphen or is taken")
    for needed in ("equation", "source"):
        if not hasattr(part, needed):
            raise ValueError(f"part {part.name} has no {needed}, which `normattn list` shows")
    if "__dataclass_fields__" not in own:
        # Done in place: the class stays the same object.
        dataclass(frozen=True)(part)
    _PARTS[part.name] = part
    return part


@cache
def _discover() -> None:
    """Import every file of this folder: parts register themselves."""
    package = importlib.import_module("normattn.score.parts")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")


def parts() -> Mapping[str, type[Part]]:
    """All registered parts by name, in the order of slots and then of names."""
    _discover()
    slots = list(Slot)
    ordered = sorted(_PARTS.items(), key=lambda item: (slots.index(item[1].slot), item[0].lower()))
    return MappingProxyType(dict(ordered))


def find(name: str) -> type[Part]:
    """The part of that name; `InputError` names the nearest ones when there is none."""
    _discover()
    if name in _PARTS:
        return _PARTS[name]
    lowered = {key.lower(): key for key in parts()}
    near = [lowered[key] for key in difflib.get_close_matches(name.lower(), lowered, 3, 0.5)]
    # A name that the literature has for another one is in its summary: KeyNorm for KNA.
    word = re.compile(rf"\b{re.escape(name)}\b", re.IGNORECASE)
    also = [key for key, part in parts().items() if word.search(part.summary) and key not in near]
    exact = [lowered[name.lower()]] if name.lower() in lowered else []
    near = exact or [*also[:1], *near]
    hint = f"; did you mean {' or '.join(near)}?" if near else ";"
    raise InputError(f"unknown component {name!r}{hint} `normattn list` shows all of them")


def arrange(chosen: Iterable[Part]) -> tuple[Part, ...]:
    """One part per slot, in the order of slots; a position that was not named is put in.

    Raises `InputError` for two parts of one slot, and where no variant is named.
    """
    slots: dict[Slot, Part] = {}
    for part in chosen:
        if part.slot in slots:
            first = slots[part.slot].name
            raise InputError(
                f"{first} and {part.name} cannot be combined: both choose the {part.slot}"
            )
        slots[part.slot] = part
    if Slot.VARIANT not in slots:
        named = "-".join(part.name for part in slots.values())
        hint = f": write Baseline-{named}, say" if named else ", e.g. Baseline, KNA or CosA"
        raise InputError(f"a score needs a variant first{hint}")
    slots.setdefault(Slot.POSITION, default_position(slots))
    return tuple(slots[slot] for slot in Slot if slot in slots)


def default_position(slots: Iterable[Slot]) -> Part:
    """RoPE if no position is named; NoPE with a bias, which encodes position itself."""
    return find("NoPE" if Slot.BIAS in slots else "RoPE")()
