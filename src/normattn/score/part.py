"""What a part of a score specification is: a frozen value with a name, a slot and parameters.

The score of query i and key j (0-based) is

    s(i, j) = cap( λ(i) · ⟨ P_i N_q(q_i), P_j N_k(k_j) ⟩ + r(i, j) ) + b(i, j)

with r carried up from the layers below, and softmax, or another normaliser, runs over the keys that
i may see, and over a sink where there is one. Every part fills one slot of it. A new method is one
new file in `score/parts`, whose class is registered with `@register`; the parser, the tables and
`normattn list` then know it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Literal

from normattn.errors import InputError

When = Literal["trained-in", "post-hoc", "either"]


class Slot(StrEnum):
    """The places of a specification, in the order in which a name prints them."""

    VARIANT = "variant"
    LOGN = "logn"
    ORDER = "order"
    POSITION = "position"
    SPECTRUM = "spectrum"
    REGIME = "regime"
    CARRY = "carry"
    BIAS = "bias"
    CAP = "cap"
    SINK = "sink"
    NORMALISER = "normaliser"
    GATE = "gate"
    VISIBLE = "visible"
    DOCUMENTS = "documents"
    LAYOUT = "layout"

    @property
    def says(self) -> str:
        """What a part in this slot decides, in the words of `Part`'s equation."""
        return _SAYS[self]


_SAYS = {
    Slot.VARIANT: "N_q, N_k and the constant part of λ",
    Slot.LOGN: "how λ grows with n or the position",
    Slot.ORDER: "normalise after the rotation, N(P x)",
    Slot.POSITION: "P; RoPE, unnamed, unless it has parameters",
    Slot.SPECTRUM: "other rotary frequencies, after training",
    Slot.REGIME: "other relative positions far away, after training",
    Slot.CARRY: "r: what the layers below hand on",
    Slot.BIAS: "b, by distance or by the tokens between",
    Slot.CAP: "cap·tanh(s/cap)",
    Slot.SINK: "one more logit per head in the denominator",
    Slot.NORMALISER: "how a row of scores becomes weights; softmax where none is named",
    Slot.GATE: "what the layer multiplies each head's output with",
    Slot.VISIBLE: "keys within a window or chunk only",
    Slot.DOCUMENTS: "documents in one row do not see each other",
    Slot.LAYOUT: "different scores in different layers",
}


@dataclass(frozen=True)
class Part:
    """One named choice of a score specification; its fields are its parameters.

    A field whose default is None is filled by `resolved` (from the training length, or from the
    factor of the table).
    """

    name: ClassVar[str]
    slot: ClassVar[Slot]
    summary: ClassVar[str]
    equation: ClassVar[str]
    source: ClassVar[str]
    used_by: ClassVar[str] = ""
    """Well-known models that have it, for the reader."""
    when: ClassVar[When]
    needs_rotary: ClassVar[bool] = False
    needs_causal: ClassVar[bool] = False
    """Whether it is defined for causal attention only."""

    def resolved(self, train_length: int | None, factor: float | None) -> Part:
        """This part with what it takes from the training length or the table's factor filled in."""
        return self

    def in_layer(self, layer: int) -> Part:
        """This part in layer `layer` (0-based), with what it takes from its number filled in."""
        return self

    def missing(self, train_length: int | None) -> str | None:
        """The name of a value that this part needs and does not have, or None."""
        empty = [f.name for f in dataclasses.fields(self) if getattr(self, f.name) is None]
        return empty[0] if empty else None

    def conflict(self, parts: Mapping[Slot, Part]) -> str | None:
        """Why this part makes no sense beside the others of a score; None where it does."""
        return None

    def require(self, condition: bool, field: str, expected: str) -> None:
        """Raise `InputError` naming the part, the field, its value and what was expected."""
        if not condition:
            value = getattr(self, field)
            raise InputError(f"{self.name}: {field} must be {expected}, but it is {value}")
