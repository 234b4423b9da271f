"""Variants: the normalisation of queries and keys, with the constant part of λ."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from normattn.errors import InputError
from normattn.score.norms import Across, Kind, Normalisation
from normattn.score.parts.base import TRAIN_LENGTH, Part, Slot, number, one_of, register


@dataclass(frozen=True)
class Variant(Part):
    """The normalisation of queries and keys, and the base of λ; a training-time choice.

    `sides` are normalised ("Q", "K", "QK" or ""), by `normalisation`. `logn_replaces_base`: with
    `-logn` the base depends on n (`base_at`), and log-n does not multiply it.
    """

    slot = Slot.VARIANT
    sides: ClassVar[str] = ""
    logn_replaces_base: ClassVar[bool] = False

    def normalisation(self) -> Normalisation:
        """The normalisation: L2 by default."""
        return Normalisation("l2")

    def query_norm(self) -> Normalisation | None:
        """The normalisation N_q, or None."""
        return self.normalisation() if "Q" in self.sides else None

    def key_norm(self) -> Normalisation | None:
        """The normalisation N_k, or None."""
        return self.normalisation() if "K" in self.sides else None

    def base(self, head_dim: int, train_length: int | None) -> float:
        """The constant part of λ: 1/√d by default."""
        return 1.0 / math.sqrt(head_dim)

    def base_at(self, n: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """The base as a function of n, if `logn_replaces_base`."""
        raise InputError(f"{self.name} has no base that depends on the position")

    def learned_base(self, train_length: int | None) -> float | None:
        """The initial value of a learned λ; None by default."""
        return None


@dataclass(frozen=True)
class ScaledVariant(Variant):
    """A variant with the parameter `scale`, the constant part of λ; 1/√d by default.

    Used by Gemma 2 and 3 (query_pre_attn_scalar^−½) and Granite (attention_multiplier).
    """

    scale: float | None = number(default=None, above=0, optional=True)

    def base(self, head_dim: int, train_length: int | None) -> float:
        """`scale`, or 1/√d."""
        return super().base(head_dim, train_length) if self.scale is None else self.scale


@register
class Baseline(ScaledVariant):
    """No normalisation, scale 1/√d."""

    equation = "s = ⟨q, k⟩ / √d"
    source = "Vaswani et al. 2017, arXiv 1706.03762"


@dataclass(frozen=True)
class UnitNorm(Variant):
    """Queries or keys of length 1: the L2 norm replaces 1/√d."""

    source = "kexue.fm/archives/9859"

    def base(self, head_dim: int, train_length: int | None) -> float:
        """1."""
        return 1.0


@register
class QNA(UnitNorm):
    """Queries of length 1, scale 1: query-normalised attention."""

    equation = "s = ⟨q/‖q‖, k⟩"
    sides = "Q"


@register
class KNA(UnitNorm):
    """Keys of length 1, scale 1: key-normalised attention (KeyNorm)."""

    equation = "s = ⟨q, k/‖k‖⟩"
    sides = "K"


@register
class CosA(Variant):
    """Cosine of query and key, scale c·ln m.

    m = L/2 with training length L. With `-logn`, m = n, the number of visible keys, and λ is not
    multiplied again. c is 4, as in the post; an older post has 3.5.
    """

    equation = "s = c·ln m · ⟨q/‖q‖, k/‖k‖⟩, m = L/2 (−logn: m = n)"
    source = "kexue.fm/archives/9859"
    sides = "QK"
    needs_length = True
    logn_replaces_base = True
    c: float = number(default=4.0, above=0)

    def base(self, head_dim: int, train_length: int | None) -> float:
        """c·ln(L/2)."""
        return self.c * math.log(self.required_length(train_length) / 2)

    def base_at(self, n: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """c·ln n."""
        return n.log() * self.c


@register
class QKNorm2020(UnitNorm):
    """Cosine of query and key, learned scale.

    `length` is l, the 97.5th-percentile length of the training sequences; None takes the training
    length. `Score` multiplies by g, one number per attention layer.
    """

    equation = "s = g · ⟨q/‖q‖, k/‖k‖⟩, g₀ = log₂(l² − l)"
    source = "Henry et al., arXiv 2010.04245"
    sides = "QK"
    length: int | None = number(default=None, least=2, fill=TRAIN_LENGTH)

    def learned_base(self, train_length: int | None) -> float | None:
        """log2(l² − l)."""
        length = self.required("length")
        return math.log2(length * length - length)


@register
class NGPT(Variant):
    """Cosine of query and key with a gain for each feature of a head, scale √d.

    The gains of queries and of keys start at 1. nGPT has one gain for both, and rotates before it
    normalises (`NGPT-RotateFirst`). Its residual placement is `nGPT`.
    """

    equation = "s = √d·⟨N(q), N(k)⟩, N(x) = x/‖x‖·g"
    source = "arXiv 2410.01131; github.com/NVIDIA/ngpt"
    sides = "QK"

    def normalisation(self) -> Normalisation:
        """L2 with a gain (H, D)."""
        return Normalisation("l2", gain=True, across="each")

    def base(self, head_dim: int, train_length: int | None) -> float:
        """√d."""
        return math.sqrt(head_dim)


@dataclass(frozen=True)
class SidedNorm(ScaledVariant):
    """A norm of the sides that the name starts with; λ is 1/√d, or `scale`.

    `gain`: a learned factor for each feature, in most norms with a bias; all heads share it.
    """

    kind: ClassVar[Kind]
    gain: bool = True

    def normalisation(self) -> Normalisation:
        """The norm with this gain, and with the part's `across` and `eps` if it has them."""
        across: Across = getattr(self, "across", "head")
        return Normalisation(self.kind, self.gain, across, getattr(self, "eps", None))


@dataclass(frozen=True)
class FeatureNorm(SidedNorm):
    """A norm over features, by default with statistics per head.

    `across=each` gives each head its own gain (Command R+); `across=all` takes statistics over all
    heads together (OLMo 2).
    """

    source = "arXiv 2302.05442 (ViT-22B)"
    across: Across = one_of("head", "all", "each", default="head")  # noqa: RUF009
    eps: float = number(default=1e-6, least=0)


@register
class QKLayerNorm(FeatureNorm):
    """LayerNorm on queries and keys, scale 1/√d."""

    equation = "s = ⟨N(q), N(k)⟩ / √d, N(x) = (x − mean)/√(var + eps)·g + b"
    kind, sides = "layer", "QK"


@register
class QLayerNorm(FeatureNorm):
    """LayerNorm on queries, scale 1/√d."""

    equation = "s = ⟨N(q), k⟩ / √d, N(x) = (x − mean)/√(var + eps)·g + b"
    kind, sides = "layer", "Q"


@register
class KLayerNorm(FeatureNorm):
    """LayerNorm on keys, scale 1/√d."""

    equation = "s = ⟨q, N(k)⟩ / √d, N(x) = (x − mean)/√(var + eps)·g + b"
    kind, sides = "layer", "K"


_RMS_NORM = "arXiv 1910.07467; on queries and keys: arXiv 2501.00656 (OLMo 2)"


@register
class QKRMSNorm(FeatureNorm):
    """RMSNorm on queries and keys, scale 1/√d."""

    equation = "s = ⟨N(q), N(k)⟩ / √d, N(x) = x/√(mean x² + eps)·g"
    kind, sides, source = "rms", "QK", _RMS_NORM


@register
class QRMSNorm(FeatureNorm):
    """RMSNorm on queries, scale 1/√d."""

    equation = "s = ⟨N(q), k⟩ / √d, N(x) = x/√(mean x² + eps)·g"
    kind, sides, source = "rms", "Q", _RMS_NORM


@register
class KRMSNorm(FeatureNorm):
    """RMSNorm on keys, scale 1/√d."""

    equation = "s = ⟨q, N(k)⟩ / √d, N(x) = x/√(mean x² + eps)·g"
    kind, sides, source = "rms", "K", _RMS_NORM


@register
class QKDyT(SidedNorm):
    """DyT on queries and keys, scale 1/√d.

    A bounded function of each feature instead of a norm, with a learned α for each side.
    """

    equation = "s = ⟨N(q), N(k)⟩ / √d, N(x) = tanh(α·x)·g + b"
    source = "arXiv 2503.10622"
    kind, sides = "dyt", "QK"


@register
class QKDerf(SidedNorm):
    """Derf on queries and keys, scale 1/√d.

    A bounded function like `QKDyT`.
    """

    equation = "s = ⟨N(q), N(k)⟩ / √d, N(x) = erf(α·x + s)·g + b"
    source = "arXiv 2512.10938"
    kind, sides = "derf", "QK"


@dataclass(frozen=True)
class TokenNorm(SidedNorm):
    """A norm over tokens, not causal."""

    source = "arXiv 1502.03167, 1607.08022; kexue.fm/archives/9859"
    eps: float = number(default=1e-5, least=0)


@register
class QKBatchNorm(TokenNorm):
    """BatchNorm on queries and keys, scale 1/√d; not causal."""

    equation = "s = ⟨N(q), N(k)⟩ / √d, N over batch and tokens"
    kind, sides = "batch", "QK"


@register
class QBatchNorm(TokenNorm):
    """BatchNorm on queries, scale 1/√d; not causal."""

    equation = "s = ⟨N(q), k⟩ / √d, N over batch and tokens"
    kind, sides = "batch", "Q"


@register
class KBatchNorm(TokenNorm):
    """BatchNorm on keys, scale 1/√d; not causal."""

    equation = "s = ⟨q, N(k)⟩ / √d, N over batch and tokens"
    kind, sides = "batch", "K"


@register
class QKInstanceNorm(TokenNorm):
    """InstanceNorm on queries and keys, scale 1/√d; not causal."""

    equation = "s = ⟨N(q), N(k)⟩ / √d, N over the tokens of a row"
    kind, sides = "instance", "QK"


@register
class QInstanceNorm(TokenNorm):
    """InstanceNorm on queries, scale 1/√d; not causal."""

    equation = "s = ⟨N(q), k⟩ / √d, N over the tokens of a row"
    kind, sides = "instance", "Q"


@register
class KInstanceNorm(TokenNorm):
    """InstanceNorm on keys, scale 1/√d; not causal."""

    equation = "s = ⟨q, N(k)⟩ / √d, N over the tokens of a row"
    kind, sides = "instance", "K"
