"""Positions: RoPE and its variants, none at all, and the order of rotation and norm."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from normattn.errors import InputError
from normattn.score.parts.base import TRAIN_LENGTH, Part, Parts, Slot, number, one_of, register
from normattn.score.parts.qk_norm import Variant

Theta = Float[Tensor, "half"]
"""A number for each pair of features that rotates, such as θ_m."""
Keys = Float[Tensor, "b g s d"]


def rope_frequencies(head_dim: int, base: float) -> Theta:
    """θ_m = base^(−2m/d) in float64, m = 0 … d/2 − 1, for even d (kexue.fm/archives/8265)."""
    if head_dim < 2 or head_dim % 2:
        raise InputError(f"rotary positions need an even head dimension, but it is {head_dim}")
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim
    return torch.tensor(base, dtype=torch.float64, device="cpu") ** -exponent


@dataclass(frozen=True)
class Position(Part):
    """How queries and keys rotate with the position: P_i."""

    slot = Slot.POSITION
    rotary: ClassVar[bool] = False


@register
class NoPE(Position):
    """No position.

    A causal model learns order from its mask alone.
    """

    equation = "P_i = 1"
    source = "arXiv 2305.19466"


@dataclass(frozen=True)
class RotaryPosition(Position):
    """A position that rotates feature pair m by the angle i·base^(−2m/d).

    `layout="half"` pairs feature m with m + d/2, `layout="interleaved"` pairs 2m with 2m + 1.
    `widens`: `query_features` and `key_features` return more features than they get.
    """

    rotary = True
    widens: ClassVar[bool] = False
    base: float = number(default=10000.0, above=1)
    layout: Literal["half", "interleaved"] = one_of("half", "interleaved", default="half")

    def rotary_dim(self, head_dim: int) -> int:
        """The number of consecutive features that rotate."""
        return head_dim

    def rotary_start(self, head_dim: int) -> int:
        """The first feature that rotates."""
        return 0

    def adjusted(self, theta: Theta) -> Theta:
        """The frequencies of this position, from the frequencies of RoPE or a RoPE scaling."""
        return theta

    def learned(self, kv_heads: int, head_dim: int) -> dict[str, Float[Tensor, "g d"]]:
        """The initial values of learned parameters, by name; empty by default."""
        return {}

    def query_features(self, q: Float[Tensor, "b h t d"]) -> Float[Tensor, "b h t wide"]:
        """The features of a query that rotate."""
        return q

    def key_features(self, k: Keys, learned: Mapping[str, Tensor]) -> Float[Tensor, "b g s wide"]:
        """The features of a key that rotate."""
        return k

    def log_growth(self, head_dim: int) -> Theta | None:
        """ln of the factor by which pair m of a query grows, and of a key shrinks, per token."""
        return None


@register
class RoPE(RotaryPosition):
    """Rotary position (the default).

    `direction="backward"` rotates by the negative angle, as nanochat does. It equals RoPE with the
    features of each pair swapped, so a model trained with one does not work with the other.
    """

    equation = "P_i: pair m rotated by i·base^(−2m/d), or by −i·base^(−2m/d)"
    source = "kexue.fm/archives/8265, arXiv 2104.09864"
    used_by = "Llama, Mistral, Qwen and most open decoders since 2021"
    direction: Literal["forward", "backward"] = one_of("forward", "backward", default="forward")

    def adjusted(self, theta: Theta) -> Theta:
        """θ_m, or −θ_m backward."""
        return theta if self.direction == "forward" else -theta


@register
class PartialRoPE(RotaryPosition):
    """Rotary position on some of the features.

    The number r of features that rotate is rounded down to an even number, and is at least 2;
    frequencies are those of a head of that size. `side` says whether the first or the last features
    rotate. In multi-head latent attention the last ones do, which all heads share.
    """

    equation = "P_i: RoPE on the first, or last, r = max(2, 2⌊fraction·d/2⌋) features"
    source = "arXiv 2204.06745 (GPT-NeoX); side=last: arXiv 2405.04434"
    used_by = "GPT-NeoX, Phi; side=last: DeepSeek-V2 and V3"
    fraction: float = number(default=0.5, above=0, most=1)
    side: Literal["first", "last"] = one_of("first", "last", default="first")

    def rotary_dim(self, head_dim: int) -> int:
        """max(2, 2⌊fraction·d/2⌋)."""
        return max(2, int(self.fraction * head_dim) // 2 * 2)

    def rotary_start(self, head_dim: int) -> int:
        """0, or d − r where the last features rotate."""
        return 0 if self.side == "first" else head_dim - self.rotary_dim(head_dim)


@register
class PRoPE(RotaryPosition):
    """Rotary position whose lowest frequencies are 0.

    A `fraction` p of all pairs rotates, the fastest, with the frequencies of the whole head. In
    `PartialRoPE`, by contrast, p·d features rotate with the frequencies of a head of that size. p =
    1 is RoPE, and the limit p → 0 is NoPE.
    """

    equation = "θ_m = base^(−2m/d) for m < ⌊p·d/2⌋, else 0"
    source = "arXiv 2410.06205; transformers: rope_type proportional"
    used_by = "Gemma 4"
    fraction: float = number(default=0.75, above=0, most=1)

    def adjusted(self, theta: Theta) -> Theta:
        """θ_m for the first ⌊p·d/2⌋ pairs, 0 for the others."""
        rotating = int(self.fraction * 2 * theta.numel() // 2)
        return torch.where(torch.arange(theta.numel(), device=theta.device) < rotating, theta, 0.0)


@register
class HoPE(RotaryPosition):
    """Rotary position without the frequencies that complete no turn in training.

    Pairs whose turn is longer than `length`, by default the training length, do not rotate. So
    longer text has no new angles. Unlike in `PRoPE`, the length decides how many pairs rotate.
    Unlike with `ClippedRoPE`, the model is trained with it.
    """

    equation = "θ_m = base^(−2m/d) where θ_m ≥ 2π/L, else 0"
    source = "arXiv 2410.21216"
    length: int | None = number(default=None, least=1, fill=TRAIN_LENGTH)

    def adjusted(self, theta: Theta) -> Theta:
        """θ_m of the pairs that complete a turn in training, and of the first pair; else 0."""
        trained = rope_frequencies(2 * theta.numel(), self.base).to(theta.device)
        rotates = trained >= 2 * math.pi / self.required("length")
        rotates[0] = True
        return torch.where(rotates, theta, 0.0)


@register
class XPos(RotaryPosition):
    """Rotary position with a decay by distance.

    Feature pair m of the d/2 of a head decays by ζ_m^((i−j)/B), with `gamma` γ and `scale` B. The
    factors depend on the absolute position, so that a cache can grow. The dtype limits the length:
    to about 18,000 tokens in float32 with B = 512. RoPE scaling does not change the decay.
    """

    equation = (
        "RoPE, then pair m of q_i × ζ_m^(i/B), of k_j × ζ_m^(−j/B), ζ_m = (2m/d + γ)/(1 + γ), "
        "γ = gamma, B = scale"
    )
    source = "arXiv 2212.10554"
    gamma: float = number(default=0.4, above=0)
    scale: float = number(default=512.0, above=0)

    def log_growth(self, head_dim: int) -> Theta | None:
        """ln ζ_m / B."""
        share = torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim
        return ((share + self.gamma) / (1 + self.gamma)).log() / self.scale


@register
class PoPE(RotaryPosition):
    """A feature's size is content, its angle is position.

    Every feature is a complex number of size softplus(x), whose angle depends only on its position.
    So there are d frequencies θ_c = base^(−c/d), and a kernel gets 2·d features. δ, a bias of the
    angles, is learned per key head and feature, and starts at 0.
    """

    equation = "⟨q, k⟩ = Σ_c softplus(q_c)·softplus(k_c)·cos((i−j)·θ_c − δ_c)"
    source = "arXiv 2509.10534"
    widens = True
    excludes: ClassVar[Mapping[Slot, str]] = {
        Slot.ORDER: "a norm of what has been rotated would mix sizes and angles"
    }

    def rotary_dim(self, head_dim: int) -> int:
        """2·d: each feature is a pair."""
        return 2 * head_dim

    def learned(self, kv_heads: int, head_dim: int) -> dict[str, Float[Tensor, "g d"]]:
        """δ = 0."""
        return {"delta": torch.zeros(kv_heads, head_dim)}

    def query_features(self, q: Float[Tensor, "b h t d"]) -> Float[Tensor, "b h t wide"]:
        """(softplus(q), 0)."""
        size = F.softplus(q)
        return self._pairs(size, torch.zeros_like(size))

    def key_features(self, k: Keys, learned: Mapping[str, Tensor]) -> Float[Tensor, "b g s wide"]:
        """softplus(k)·(cos δ, sin δ)."""
        size, delta = F.softplus(k), learned["delta"].to(k.dtype)[:, None]
        return self._pairs(size * delta.cos(), size * delta.sin())

    def _pairs(self, first: Tensor, second: Tensor) -> Tensor:
        if self.layout == "half":
            return torch.cat((first, second), -1)
        return torch.stack((first, second), -1).flatten(-2)


@register
class RotateFirst(Part):
    """Rotate, then normalise.

    The gain of a normalisation then applies to rotated features. Without gain and mean the order
    does not matter, since a rotation keeps lengths. With either, more than the distance matters.
    """

    slot = Slot.ORDER
    equation = "s = λ·⟨N_q(P_i q), N_k(P_j k)⟩"
    source = "the order of Llama 4 and Hunyuan"
    needs_rotary = True

    def conflict(self, parts: Parts) -> str | None:
        """It needs a normalisation, and a rotation that keeps lengths."""
        variant, position = parts[Slot.VARIANT], parts[Slot.POSITION]
        if isinstance(variant, Variant) and not (variant.query_norm() or variant.key_norm()):
            why = f"{variant.name} normalises nothing, so there is no order to choose"
            return self.refusal(variant, why)
        if isinstance(position, RotaryPosition) and position.log_growth(2) is not None:
            why = "its growth would be normalised away, so more than the distance would matter"
            return self.refusal(position, why)
        return None
