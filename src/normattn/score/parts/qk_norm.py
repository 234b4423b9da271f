"""Variants: how queries and keys are normalised, and the constant part of λ that goes with it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from normattn.errors import InputError
from normattn.score.norms import Across, Kind, Normalisation
from normattn.score.parts.base import Part, Slot, by_length, number, one_of, register


@dataclass(frozen=True)
class Variant(Part):
    """Normalisation of queries and keys and the base of λ that goes with it; trained in.

    `sides` says which are normalised: "Q", "K", "QK" or neither; `normalisation` says how.
    `logn_replaces_base`: with `-logn` the base depends on n and nothing else multiplies it.
    """

    slot = Slot.VARIANT
    sides: ClassVar[str] = ""
    logn_replaces_base: ClassVar[bool] = False

    def normalisation(self) -> Normalisation:
        """The normalisation of every side: L2 unless the variant says otherwise."""
        return Normalisation("l2")

    def query_norm(self) -> Normalisation | None:
        """The normalisation N_q, or None."""
        return self.normalisation() if "Q" in self.sides else None

    def key_norm(self) -> Normalisation | None:
        """The normalisation N_k, or None."""
        return self.normalisation() if "K" in self.sides else None

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
class ScaledVariant(Variant):
    """A variant with the parameter `scale`: the constant part of λ, 1/√d where it is not given.

    Gemma 2 and 3 (query_pre_attn_scalar^−½), Granite (attention_multiplier).
    """

    scale: float | None = number(default=None, above=0, optional=True)

    def base(self, head_dim: int, train_length: int | None) -> float:
        """`scale`, or 1/√d."""
        return super().base(head_dim, train_length) if self.scale is None else self.scale


@register
class Baseline(ScaledVariant):
    """s(i, j) = ⟨q_i, k_j⟩ / √d, or · `scale` (Vaswani et al. 2017, arXiv 1706.03762)."""

    name = "Baseline"
    summary = "no normalisation, scale 1/√d"
    equation = "s = ⟨q, k⟩ / √d"
    source = "arXiv 1706.03762"


@register
class QNA(Variant):
    """Query-normalised attention: s(i, j) = ⟨q_i/‖q_i‖, k_j⟩ (kexue.fm/archives/9859)."""

    name = "QNA"
    summary = "queries of length 1, scale 1"
    equation = "s = ⟨q/‖q‖, k⟩"
    source = "kexue.fm/archives/9859"
    sides = "Q"

    def base(self, head_dim: int, train_length: int | None) -> float:
        """1: the L2 norm replaces 1/√d."""
        return 1.0


@register
class KNA(Variant):
    """Key-normalised attention (KeyNorm): s(i, j) = ⟨q_i, k_j/‖k_j‖⟩ (kexue.fm/archives/9859)."""

    name = "KNA"
    summary = "keys of length 1, scale 1 (KeyNorm)"
    equation = "s = ⟨q, k/‖k‖⟩"
    source = "kexue.fm/archives/9859"
    sides = "K"

    def base(self, head_dim: int, train_length: int | None) -> float:
        """1: the L2 norm replaces 1/√d."""
        return 1.0


@register
class CosA(Variant):
    """s(i, j) = c·ln m · cos(q_i, k_j), c = 4 (kexue.fm/archives/9859; 3.5 in the older post).

    m = L/2 with training length L; with `-logn`, m = n, the number of visible keys, which there
    replaces m and multiplies nothing.
    """

    name = "CosA"
    summary = "cosine of query and key, scale c·ln m"
    equation = "s = c·ln m · ⟨q/‖q‖, k/‖k‖⟩, m = L/2 (−logn: m = n)"
    source = "kexue.fm/archives/9859"
    sides = "QK"
    needs_length = True
    logn_replaces_base = True
    c: float = number(default=4.0, above=0)

    def base(self, head_dim: int, train_length: int | None) -> float:
        """c·ln(L/2)."""
        return self.c * math.log(self.known_length(train_length) / 2)

    def base_at(self, n: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """c·ln n."""
        return n.log() * self.c


@register
class QKNorm2020(Variant):
    """s(i, j) = g·cos(q_i, k_j), g learned, at first log2(l² − l) (Henry et al., arXiv 2010.04245).

    `length` is l, the 97.5th-percentile length of the training sequences; None takes the training
    length. g is one number per attention layer.
    """

    name = "QKNorm2020"
    summary = "cosine of query and key, learned scale"
    equation = "s = g · ⟨q/‖q‖, k/‖k‖⟩, g₀ = log₂(l² − l)"
    source = "arXiv 2010.04245"
    sides = "QK"
    length: int | None = number(default=None, least=2, fill=by_length(lambda length: length))

    def base(self, head_dim: int, train_length: int | None) -> float:
        """1: the learned scale is multiplied in by the module."""
        return 1.0

    def learned_base(self, train_length: int | None) -> float | None:
        """log2(l² − l)."""
        length: int = self.known("length")
        return math.log2(length * length - length)


_WHO = {"QK": "queries and keys", "Q": "queries", "K": "keys"}


@dataclass(frozen=True)
class SidedNorm(ScaledVariant):
    """A normalisation on the sides that the name begins with; keeps 1/√d, or `scale`.

    A subclass whose name is QK, Q or K and its `title` has those sides, and gets its summary and
    equation from them and from what its base says of the norm: `title`, `meaning` and `note`.
    """

    kind: ClassVar[Kind]
    title: ClassVar[str]
    meaning: ClassVar[str]
    note: ClassVar[str] = ""

    def __init_subclass__(cls) -> None:
        sides = cls.__name__.removesuffix(getattr(cls, "title", ""))
        if sides in _WHO:
            cls.sides, cls.name = sides, cls.__name__
            left, right = (f"N({x.lower()})" if x in sides else x.lower() for x in "QK")
            cls.summary = f"{cls.title} on {_WHO[sides]}, scale 1/√d{cls.note}"
            cls.equation = f"s = ⟨{left}, {right}⟩ / √d, {cls.meaning}"


@dataclass(frozen=True)
class FeatureNorm(SidedNorm):
    """A norm over features. Parameters: `gain` (learned), `across` (head, all, each), `eps`.

    Statistics are those of one head, its gain that of all heads; `across=each` gives each head a
    gain of its own (Command R+), `across=all` takes the heads together (OLMo 2).
    """

    source = "arXiv 2010.04245, 2302.05442"
    gain: bool = True
    across: Across = one_of("head", "all", "each", default="head")  # noqa: RUF009
    eps: float = number(default=1e-6, least=0)

    def normalisation(self) -> Normalisation:
        """LayerNorm or RMSNorm."""
        return Normalisation(self.kind, self.gain, self.across, self.eps)


@dataclass(frozen=True)
class LayerNormVariant(FeatureNorm):
    """LayerNorm of queries, keys or both."""

    kind, title = "layer", "LayerNorm"
    meaning = "N(x) = (x − mean)/√(var + eps)·g + b"


@register
class QKLayerNorm(LayerNormVariant):
    """LayerNorm on queries and keys."""


@register
class QLayerNorm(LayerNormVariant):
    """LayerNorm on queries."""


@register
class KLayerNorm(LayerNormVariant):
    """LayerNorm on keys."""


@dataclass(frozen=True)
class RMSNormVariant(FeatureNorm):
    """RMSNorm of queries, keys or both."""

    kind, title = "rms", "RMSNorm"
    meaning = "N(x) = x/√(mean x² + eps)·g"


@register
class QKRMSNorm(RMSNormVariant):
    """RMSNorm on queries and keys."""


@register
class QRMSNorm(RMSNormVariant):
    """RMSNorm on queries."""


@register
class KRMSNorm(RMSNormVariant):
    """RMSNorm on keys."""


@dataclass(frozen=True)
class SequenceNorm(SidedNorm):
    """A norm over tokens, not causal. Parameters: `gain` (learned, with a bias), `eps`."""

    source = "arXiv 1502.03167, 1607.08022; kexue.fm/archives/9859"
    note = "; not causal"
    gain: bool = True
    eps: float = number(default=1e-5, least=0)

    def normalisation(self) -> Normalisation:
        """BatchNorm or InstanceNorm."""
        return Normalisation(self.kind, self.gain, eps=self.eps)


@dataclass(frozen=True)
class BatchNormVariant(SequenceNorm):
    """BatchNorm of queries, keys or both."""

    kind, title, meaning = "batch", "BatchNorm", "N over batch and tokens"


@register
class QKBatchNorm(BatchNormVariant):
    """BatchNorm on queries and keys."""


@register
class QBatchNorm(BatchNormVariant):
    """BatchNorm on queries."""


@register
class KBatchNorm(BatchNormVariant):
    """BatchNorm on keys."""


@dataclass(frozen=True)
class InstanceNormVariant(SequenceNorm):
    """InstanceNorm of queries, keys or both."""

    kind, title, meaning = "instance", "InstanceNorm", "N over the tokens of a row"


@register
class QKInstanceNorm(InstanceNormVariant):
    """InstanceNorm on queries and keys."""


@register
class QInstanceNorm(InstanceNormVariant):
    """InstanceNorm on queries."""


@register
class KInstanceNorm(InstanceNormVariant):
    """InstanceNorm on keys."""
