"""What a part of a score specification is: a frozen value with a name, a slot and parameters.

The score of query i and key j (0-based) is

    s(i, j) = cap( λ(i) · ⟨ P_i N_q(q_i), P_j N_k(k_j) ⟩ + r(i, j) ) + b(i, j)

with r carried up from the layers below, and softmax runs over the keys that i may see, and over a
sink where there is one. Every part fills one slot of it. A new method is one new file in
`score/parts`, whose class is registered with `@register`; the parser, the tables and `normattn
list` then know it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
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
    ORDER = "order"
    POSITION = "position"
    SPECTRUM = "spectrum"
    REGIME = "regime"
    CARRY = "carry"
    BIAS = "bias"
    CAP = "cap"
    SINK = "sink"
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
    Slot.REGIME: "two regimes of relative position, after training",
    Slot.CARRY: "r: what the layers below hand on",
    Slot.BIAS: "b, by distance or by the tokens between",
    Slot.CAP: "cap·tanh(s/cap)",
    Slot.SINK: "one more logit per head in the denominator",
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
    label: ClassVar[str] = ""
    slot: ClassVar[Slot]
    summary: ClassVar[str]
    equation: ClassVar[str]
    source: ClassVar[str]
    used_by: ClassVar[str] = ""
    """Well-known models that have it, for the reader."""
    when: ClassVar[When]
    needs_rotary: ClassVar[bool] = False

    def resolved(self, train_length: int | None, factor: float | None) -> Part:
        """This part with what it takes from the training length or the table's factor filled in."""
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
        self, n: Float[Tensor, "*b t"], learned: Mapping[str, Tensor]
    ) -> Float[Tensor, "*b h t"]:
        """The multiplier of λ beside `factor` for n visible keys, where something is learned."""
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
        """How many leading features turn; the others carry no position."""
        return head_dim

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
class CarryPart(Part):
    """What a layer's score takes over from the layers below it: their scores, or their q and k."""

    slot: ClassVar[Slot] = Slot.CARRY
    when: ClassVar[When] = "trained-in"
    carries: ClassVar[Literal["scores", "features"]]

    @property
    def mean(self) -> bool:
        """Whether what is carried counts as a mean over the layers instead of a sum."""
        return False

    def conflict(self, parts: Mapping[Slot, Part]) -> str | None:
        """One product per pair, over the same pairs in every layer."""
        spectrum, layout = parts.get(Slot.SPECTRUM), parts.get(Slot.LAYOUT)
        if Slot.REGIME in parts:
            return (
                f"{self.name} and {parts[Slot.REGIME].name} cannot be combined: {self.name} "
                "carries one score per pair up through the layers, not two regimes or a window "
                "with a start"
            )
        if isinstance(spectrum, SpectrumPart) and spectrum.moving:
            return (
                f"{self.name} and {spectrum.name} cannot be combined: {spectrum.name} reads rows "
                f"in blocks with keys of their own, and {self.name} carries those of all rows at "
                "once"
            )
        if isinstance(layout, LayoutPart) and (not layout.uniform or Slot.VISIBLE in parts):
            return (
                f"{self.name} and {layout.name} cannot be combined: some layers would see keys "
                f"that those below do not, whose scores {self.name} then lacks"
            )
        return None


@dataclass(frozen=True)
class BiasPart(Part):
    """A bias b(h, |i − j|) of head h, added to the score."""

    slot: ClassVar[Slot] = Slot.BIAS
    when: ClassVar[When] = "trained-in"

    def learned(self, heads: int) -> dict[str, Float[Tensor, "h"]]:
        """The initial values of what is learned, by name; empty where nothing is."""
        return {}

    def project(self, learned: Mapping[str, Tensor]) -> None:
        """Put learned values back into their range, in place, before a training step uses them."""

    def values(
        self, distance: Float[Tensor, " r"], heads: int, learned: Mapping[str, Tensor]
    ) -> Float[Tensor, "h r"]:
        """b(h, r) for every head and distance."""
        raise InputError(f"{self.name} defines no values")


@dataclass(frozen=True)
class ForgetPart(Part):
    """A bias that sums up a gate of every token between the key and the query."""

    slot: ClassVar[Slot] = Slot.BIAS
    when: ClassVar[When] = "trained-in"


@dataclass(frozen=True)
class CapPart(Part):
    """A bound on the product: cap·tanh(s/cap)."""

    slot: ClassVar[Slot] = Slot.CAP
    when: ClassVar[When] = "trained-in"
    cap: float = 50.0


@dataclass(frozen=True)
class SinkPart(Part):
    """One more logit per head in the denominator of softmax, learned, starting at 0."""

    slot: ClassVar[Slot] = Slot.SINK
    when: ClassVar[When] = "trained-in"


@dataclass(frozen=True)
class GatePart(Part):
    """What a layer multiplies each head's output with: a gate for each feature, or for the head."""

    slot: ClassVar[Slot] = Slot.GATE
    when: ClassVar[When] = "trained-in"
    per: Literal["feature", "head"] = "feature"


@dataclass(frozen=True)
class VisiblePart(Part):
    """A window outside of which keys are hidden, trained in."""

    slot: ClassVar[Slot] = Slot.VISIBLE
    when: ClassVar[When] = "trained-in"
    window: int | None = None


@dataclass(frozen=True)
class ChunkPart(Part):
    """Chunks of positions, outside of which keys are hidden, trained in."""

    slot: ClassVar[Slot] = Slot.VISIBLE
    when: ClassVar[When] = "trained-in"
    size: int | None = None


@dataclass(frozen=True)
class DocumentsPart(Part):
    """Keys of other documents are hidden; positions count from the document's first token."""

    slot: ClassVar[Slot] = Slot.DOCUMENTS
    when: ClassVar[When] = "trained-in"
    separator: int = 0


@dataclass(frozen=True)
class LayoutPart(Part):
    """Different scores in different layers of a model.

    `stretchable`: whether post-hoc methods apply; `uniform`: whether all layers see the same keys
    (beside a window named as well).
    """

    slot: ClassVar[Slot] = Slot.LAYOUT
    when: ClassVar[When] = "trained-in"
    stretchable: ClassVar[bool] = True
    uniform: ClassVar[bool] = True

    def layer(
        self, parts: Mapping[Slot, Part], layer: int, layers: int, train_length: int | None
    ) -> Iterable[Part]:
        """The parts of layer `layer` (0-based) of `layers`, from those of the whole, less this."""
        raise InputError(f"{self.name} defines no layers")


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
