"""The kinds of parts that fold into queries and keys: N, λ, P, and methods that change P.

Legend: B batch, H query heads, G key heads, T queries, S keys, D head dimension.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from normattn.errors import InputError
from normattn.score.normalisation import Normalisation
from normattn.score.part import Part, Slot, When


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
    """The factor of λ that grows with the number of visible keys, n.

    `replaces_base`: it stands in place of a base that depends on n itself (CosA's).
    """

    slot: ClassVar[Slot] = Slot.LOGN
    replaces_base: ClassVar[bool] = False

    def factor(self, n: Float[Tensor, "..."], train_length: int | None) -> Float[Tensor, "..."]:
        """The multiplier of λ for n visible keys."""
        raise InputError(f"{self.name} defines no factor")

    def learned(self, heads: int, train_length: int | None) -> dict[str, Float[Tensor, "h"]]:
        """The initial values of what is learned, by name; empty where nothing is."""
        return {}

    def learned_factor(
        self, n: Float[Tensor, "*b one_or_h t"], learned: Mapping[str, Tensor]
    ) -> Float[Tensor, "*b h t"]:
        """The multiplier of λ beside `factor` for n visible keys, where something is learned.

        n has an axis of heads, of size 1 where all heads see as many keys.
        """
        raise InputError(f"{self.name} learns nothing")

    def missing(self, train_length: int | None) -> str | None:
        """Log-n scaling needs the training length."""
        return "train_length" if train_length is None else super().missing(train_length)


@dataclass(frozen=True)
class PositionPart(Part):
    """How a position turns a query or key: P_i."""

    slot: ClassVar[Slot] = Slot.POSITION
    when: ClassVar[When] = "trained-in"
    rotary: ClassVar[bool] = False


@dataclass(frozen=True)
class RotaryPosition(PositionPart):
    """A position that turns feature pair m by the angle i·base^(−2m/d).

    `layout="half"` pairs feature m with m + d/2, `layout="interleaved"` pairs 2m with 2m + 1.
    `widens`: what turns are features made of those that come in, by `query_features` and
    `key_features`, more of them.
    """

    rotary: ClassVar[bool] = True
    widens: ClassVar[bool] = False
    base: float = 10000.0
    layout: Literal["half", "interleaved"] = "half"

    def __post_init__(self) -> None:
        self.require(math.isfinite(self.base) and self.base > 1, "base", "a number above 1")
        self.require(self.layout in ("half", "interleaved"), "layout", "'half' or 'interleaved'")

    def rotated(self, head_dim: int) -> int:
        """How many features turn, one behind the other; the others carry no position."""
        return head_dim

    def start(self, head_dim: int) -> int:
        """The first feature that turns."""
        return 0

    def turning(self, theta: Float[Tensor, "half"]) -> Float[Tensor, "half"]:
        """The frequencies with those that the position leaves out set to 0, whatever made them."""
        return theta

    def learned(self, kv_heads: int, head_dim: int) -> dict[str, Float[Tensor, "g d"]]:
        """The initial values of what is learned, by name; empty where nothing is."""
        return {}

    def query_features(self, q: Float[Tensor, "b h t d"]) -> Float[Tensor, "b h t wide"]:
        """What turns of a query."""
        return q

    def key_features(
        self, k: Float[Tensor, "b g s d"], learned: Mapping[str, Tensor]
    ) -> Float[Tensor, "b g s wide"]:
        """What turns of a key."""
        return k

    def log_growth(self, head_dim: int) -> Float[Tensor, "half"] | None:
        """ln of the factor by which pair m of a query grows, and of a key shrinks, per token."""
        return None


@dataclass(frozen=True)
class OrderPart(Part):
    """Normalise the rotated queries and keys, N(P x), instead of rotating normalised ones."""

    slot: ClassVar[Slot] = Slot.ORDER
    when: ClassVar[When] = "trained-in"


@dataclass(frozen=True)
class SpectrumPart(Part):
    """Other rotation frequencies after training."""

    slot: ClassVar[Slot] = Slot.SPECTRUM
    when: ClassVar[When] = "post-hoc"
    needs_rotary: ClassVar[bool] = True
    moving: ClassVar[bool] = False

    def at(self, block: int, train_length: int) -> SpectrumPart:
        """The fixed spectrum of query rows block·L … block·L + L − 1; itself unless it moves."""
        return self

    def inverse_frequencies(
        self, head_dim: int, base: float, train_length: int | None
    ) -> Float[Tensor, "half"]:
        """θ'_m in float64, m = 0 … d/2 − 1, in radians per token."""
        raise InputError(f"{self.name} defines no frequencies")

    def gain(self, train_length: int | None) -> float:
        """What the spectrum multiplies λ with."""
        return 1.0


@dataclass(frozen=True)
class RegimePart(Part):
    """Two regimes of relative position: ordinary inside a window, rectified beyond it."""

    slot: ClassVar[Slot] = Slot.REGIME
    when: ClassVar[When] = "post-hoc"
    needs_rotary: ClassVar[bool] = True
    needs_causal: ClassVar[bool] = True
    window: int | None = None

    def far_positions(
        self, query: Float[Tensor, "*bq t"], key: Float[Tensor, "*bk s"]
    ) -> tuple[Float[Tensor, "*bq t"], Float[Tensor, "*bk s"]]:
        """The positions at which queries and keys are rotated where i − j ≥ window.

        A key's depends on its own position alone, so that a cache can keep the rotated key.
        """
        raise InputError(f"{self.name} defines no far positions")

    def visible(self) -> tuple[int | None, int]:
        """(w, kept): keys with i − j ≥ w are hidden but for the first `kept`; w None hides none."""
        return None, 0


@dataclass(frozen=True)
class ChunkRulesPart(Part):
    """Rules of relative position by chunks of `size` tokens: the key's own, the next, further ones.

    A key stands at one place of its own; each rule gives queries another one. Rows of a chunk read
    together: `ScoreSpec.moves`.
    """

    slot: ClassVar[Slot] = Slot.REGIME
    when: ClassVar[When] = "post-hoc"
    needs_rotary: ClassVar[bool] = True
    needs_causal: ClassVar[bool] = True
    size: int | None = None

    @property
    def reach(self) -> int:
        """No relative position is as large, and texts of so many tokens are read as they were."""
        raise InputError(f"{self.name} defines no reach")

    def key_positions(self, key: Float[Tensor, "*b s"]) -> Float[Tensor, "*b s"]:
        """Where keys are rotated to."""
        raise InputError(f"{self.name} defines no positions of keys")

    def query_positions(self, query: Float[Tensor, "*b t"]) -> tuple[Float[Tensor, "*b t"], ...]:
        """Where queries are rotated to for keys of their chunk, of the one before, and further."""
        raise InputError(f"{self.name} defines no positions of queries")


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
