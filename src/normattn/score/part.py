"""What a part of a score specification is: a frozen value with a name, a slot and parameters.

The score of query i and key j (0-based) is

    s(i, j) = λ(i) · ⟨ P_i N_q(q_i), P_j N_k(k_j) ⟩

Every part fills one slot of it. A new method is one new file in `score/parts`, whose class is
registered with `@register`; the parser, the tables and `normattn list` then know it.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from normattn.errors import InputError
from normattn.score.normalisation import Normalisation

When = Literal["trained-in", "post-hoc", "either"]


class Slot(StrEnum):
    """The places of a specification, in the order in which a name prints them."""

    VARIANT = "variant"
    LOGN = "logn"
    POSITION = "position"
    SPECTRUM = "spectrum"
    REGIME = "regime"


@dataclass(frozen=True)
class Part:
    """One named choice of a score specification; its fields are its parameters.

    A field whose default is None is filled by `resolved` (from the training length, or from the
    factor of the table).
    """

    name: ClassVar[str]
    label: ClassVar[str] = ""
    slot: ClassVar[Slot]
    summary: ClassVar[str]
    equation: ClassVar[str]
    source: ClassVar[str]
    when: ClassVar[When]
    needs_rotary: ClassVar[bool] = False

    def resolved(self, train_length: int | None, factor: float | None) -> Part:
        """This part with what it takes from the training length or the table's factor filled in."""
        return self

    def missing(self, train_length: int | None) -> str | None:
        """The name of a value that this part needs and does not have, or None."""
        empty = [f.name for f in dataclasses.fields(self) if getattr(self, f.name) is None]
        return empty[0] if empty else None

    def require(self, condition: bool, field: str, expected: str) -> None:
        """Raise `InputError` naming the part, the field, its value and what was expected."""
        if not condition:
            value = getattr(self, field)
            raise InputError(f"{self.name}: {field} must be {expected}, but it is {value}")


@dataclass(frozen=True)
class Variant(Part):
    """Normalisation of queries and keys and the base of λ that goes with it; trained in."""

    slot: ClassVar[Slot] = Slot.VARIANT
    when: ClassVar[When] = "trained-in"
    logn_replaces_base: ClassVar[bool] = False

    def query_norm(self) -> Normalisation | None:
        """The normalisation N_q, or None."""
        return None

    def key_norm(self) -> Normalisation | None:
        """The normalisation N_k, or None."""
        return None

    def base(self, head_dim: int, train_length: int | None) -> float:
        """The constant part of λ: 1/√d unless the variant says otherwise."""
        return 1.0 / math.sqrt(head_dim)

    def base_at(self, n: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """The base as a function of n, for variants whose `-logn` form replaces the base."""
        raise InputError(f"{self.name} has no base that depends on the position")

    def learned_base(self, train_length: int | None) -> float | None:
        """The initial value of a learned λ, or None where λ is not learned."""
        return None


@dataclass(frozen=True)
class LogNPart(Part):
    """The factor of λ that grows with the logarithm of the number of visible keys."""

    slot: ClassVar[Slot] = Slot.LOGN

    def factor(self, n: Float[Tensor, "..."], train_length: int) -> Float[Tensor, "..."]:
        """The multiplier of λ for n visible keys."""
        raise InputError(f"{self.name} defines no factor")

    def missing(self, train_length: int | None) -> str | None:
        """Log-n scaling needs the training length."""
        return "train_length" if train_length is None else super().missing(train_length)


@dataclass(frozen=True)
class PositionPart(Part):
    """How a position turns a query or key: P_i."""

    slot: ClassVar[Slot] = Slot.POSITION
    when: ClassVar[When] = "trained-in"
    rotary: ClassVar[bool] = True


@dataclass(frozen=True)
class SpectrumPart(Part):
    """Other rotation frequencies after training."""

    slot: ClassVar[Slot] = Slot.SPECTRUM
    when: ClassVar[When] = "post-hoc"
    needs_rotary: ClassVar[bool] = True

    def inverse_frequencies(
        self, head_dim: int, base: float, train_length: int | None
    ) -> Float[Tensor, "half"]:
        """θ'_m in float64, m = 0 … d/2 − 1, in radians per token."""
        raise InputError(f"{self.name} defines no frequencies")

    def gain(self) -> float:
        """What the spectrum multiplies λ with."""
        return 1.0


@dataclass(frozen=True)
class RegimePart(Part):
    """Two regimes of relative position: ordinary inside a window, rectified beyond it."""

    slot: ClassVar[Slot] = Slot.REGIME
    when: ClassVar[When] = "post-hoc"
    needs_rotary: ClassVar[bool] = True
    window: int | None = None

    def far_positions(
        self, query: Float[Tensor, "*bq t"], key: Float[Tensor, "*bk s"]
    ) -> tuple[Float[Tensor, "*bq t"], Float[Tensor, "*bk s"]]:
        """The positions at which queries and keys are rotated where i − j ≥ window."""
        raise InputError(f"{self.name} defines no far positions")


@dataclass(frozen=True)
class StretchedSpectrum(SpectrumPart):
    """A spectrum that stretches the readable length by `factor` (s ≥ 1)."""

    factor: float | None = None

    def __post_init__(self) -> None:
        if self.factor is not None:
            self.require(
                math.isfinite(self.factor) and self.factor >= 1, "factor", "a number of at least 1"
            )

    def resolved(self, train_length: int | None, factor: float | None) -> Part:
        """Take the factor of the table where none was given."""
        if self.factor is None and factor is not None:
            return dataclasses.replace(self, factor=factor)
        return self

    @property
    def stretch(self) -> float:
        """The factor s, which must be known by now."""
        if self.factor is None:
            raise InputError(f"{self.name} needs factor=…, the stretch of its context, at least 1")
        return self.factor


def rope_frequencies(head_dim: int, base: float) -> Float[Tensor, "half"]:
    """θ_m = base^(−2m/d) in float64, m = 0 … d/2 − 1 (kexue.fm/archives/8265).

    `head_dim` must be even.
    """
    if head_dim < 2 or head_dim % 2:
        raise InputError(f"rotary positions need an even head dimension, but it is {head_dim}")
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    return torch.tensor(base, dtype=torch.float64) ** -exponent
