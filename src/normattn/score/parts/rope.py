"""Positions: rotary ones and their relatives, none at all, and their order with a norm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from normattn.errors import InputError
from normattn.score.parts.base import Part, Parts, Slot, number, one_of, register
from normattn.score.parts.qk_norm import Variant

Half = Float[Tensor, "half"]
"""A number for each pair of features that turns."""


def rope_frequencies(head_dim: int, base: float) -> Half:
    """θ_m = base^(−2m/d) in float64, m = 0 … d/2 − 1 (kexue.fm/archives/8265).

    `head_dim` must be even.
    """
    if head_dim < 2 or head_dim % 2:
        raise InputError(f"rotary positions need an even head dimension, but it is {head_dim}")
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    return torch.tensor(base, dtype=torch.float64) ** -exponent


@dataclass(frozen=True)
class Position(Part):
    """How a position turns a query or key: P_i."""

    slot = Slot.POSITION
    rotary: ClassVar[bool] = False


@register
class NoPE(Position):
    """P_i = 1: a causal model learns order from its mask alone (arXiv 2305.19466)."""

    name = "NoPE"
    summary = "no position"
    equation = "P_i = 1"
    source = "arXiv 2305.19466"


@dataclass(frozen=True)
class RotaryPosition(Position):
    """A position that turns feature pair m by the angle i·base^(−2m/d).

    `layout="half"` pairs feature m with m + d/2, `layout="interleaved"` pairs 2m with 2m + 1.
    `widens`: what turns are features made of those that come in, by `query_features` and
    `key_features`, more of them.
    """

    rotary = True
    widens: ClassVar[bool] = False
    base: float = number(default=10000.0, above=1)
    layout: Literal["half", "interleaved"] = one_of("half", "interleaved", default="half")

    def rotated(self, head_dim: int) -> int:
        """How many features turn, one behind the other; the others carry no position."""
        return head_dim

    def start(self, head_dim: int) -> int:
        """The first feature that turns."""
        return 0

    def turning(self, theta: Half) -> Half:
        """The frequencies as this position has them, whatever scaling made them."""
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

    def log_growth(self, head_dim: int) -> Half | None:
        """ln of the factor by which pair m of a query grows, and of a key shrinks, per token."""
        return None


@register
class RoPE(RotaryPosition):
    """Rotate feature pair m of position i by the angle i·base^(−2m/d) (kexue.fm/archives/8265).

    `direction="backward"` turns by the negative angle, as nanochat does: the same as RoPE of
    features whose pairs are swapped, so a model trained with one is not read with the other.
    """

    name = "RoPE"
    summary = "rotary position (the default)"
    equation = "P_i: pair m turned by i·base^(−2m/d), or by −i·base^(−2m/d)"
    source = "kexue.fm/archives/8265, arXiv 2104.09864"
    used_by = "Llama, Mistral, Qwen and most open decoders since 2021"
    direction: Literal["forward", "backward"] = one_of("forward", "backward", default="forward")

    def turning(self, theta: Half) -> Half:
        """θ_m, or −θ_m backward."""
        return theta if self.direction == "forward" else -theta


@register
class PartialRoPE(RotaryPosition):
    """RoPE of fraction·d features, the others without position (arXiv 2204.06745).

    The number that turns is rounded down to an even one, and is at least 2; frequencies are those
    of a head of that size. `side` says whether the first or the last features turn: the last ones
    do in multi-head latent attention (arXiv 2405.04434), whose keys are of all heads' own features
    and behind them the ones that turn, which all heads share.
    """

    name = "PartialRoPE"
    summary = "rotary position on some of the features"
    equation = "P_i: RoPE on the first, or last, r = max(2, 2⌊fraction·d/2⌋) features"
    source = "arXiv 2204.06745 (GPT-NeoX); side=last: arXiv 2405.04434"
    used_by = "GPT-NeoX, Phi; side=last: DeepSeek-V2 and V3"
    fraction: float = number(default=0.5, above=0, most=1)
    side: Literal["first", "last"] = one_of("first", "last", default="first")

    def rotated(self, head_dim: int) -> int:
        """max(2, 2⌊fraction·d/2⌋)."""
        return max(2, int(self.fraction * head_dim) // 2 * 2)

    def start(self, head_dim: int) -> int:
        """0, or d − r where the last features turn."""
        return 0 if self.side == "first" else head_dim - self.rotated(head_dim)


@register
class PRoPE(RotaryPosition):
    """p-RoPE: θ_m = base^(−2m/d) for m < ⌊p·d/2⌋ and 0 from there on (arXiv 2410.06205).

    `fraction` p of the pairs turn, the fastest ones, with the frequencies of the whole head. That
    is not `PartialRoPE`, where p·d features turn with those of a head of that size.
    p = 1 is RoPE, its limit at 0 NoPE.
    """

    name = "PRoPE"
    summary = "rotary position whose lowest frequencies do not turn"
    equation = "θ_m = base^(−2m/d) for m < ⌊p·d/2⌋, else 0"
    source = "arXiv 2410.06205; transformers: rope_type proportional"
    used_by = "Gemma 4"
    fraction: float = number(default=0.75, above=0, most=1)

    def turning(self, theta: Half) -> Half:
        """θ_m for the first ⌊p·d/2⌋ pairs, 0 for the others."""
        kept = int(self.fraction * 2 * theta.numel() // 2)
        return torch.where(torch.arange(theta.numel(), device=theta.device) < kept, theta, 0.0)


@register
class XPos(RotaryPosition):
    """RoPE whose pair m decays by ζ_m^((i−j)/B), ζ_m = (2m/d + γ)/(1 + γ) (arXiv 2212.10554).

    Queries are multiplied by ζ_m^(i/B), keys by ζ_m^(−j/B), by the absolute position, so that a
    cache may grow; `gamma` γ, `scale` B. A dtype ends the readable length: at about 18 000 tokens
    in float32 with B = 512. RoPE scaling changes the frequencies and leaves the decay.
    """

    name = "XPos"
    summary = "rotary position with a decay by distance"
    equation = "P_i: RoPE, pair m of q × ζ_m^(i/B), of k × ζ_m^(−j/B)"
    source = "arXiv 2212.10554"
    gamma: float = number(default=0.4, above=0)
    scale: float = number(default=512.0, above=0)

    def log_growth(self, head_dim: int) -> Half | None:
        """ln ζ_m / B."""
        share = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
        return ((share + self.gamma) / (1 + self.gamma)).log() / self.scale


@register
class PoPE(RotaryPosition):
    """⟨q, k⟩ = Σ_c softplus(q_c)·softplus(k_c)·cos((i − j)·θ_c − δ_c), θ_c = base^(−c/d).

    Polar coordinates (arXiv 2509.10534): every feature is a complex number of that size, whose
    angle is its position's alone, so d frequencies turn, and what reaches a kernel has 2·d
    features. δ, the bias of the angles, is learned per key head and feature, and starts at 0.
    """

    name = "PoPE"
    summary = "a feature's size is content, its angle is position"
    equation = "⟨q, k⟩ = Σ_c softplus(q_c)·softplus(k_c)·cos((i−j)·θ_c − δ_c)"
    source = "arXiv 2509.10534"
    widens = True
    excludes: ClassVar[Mapping[Slot, str]] = {
        Slot.ORDER: "a norm of what has been turned would mix sizes and angles"
    }

    def rotated(self, head_dim: int) -> int:
        """2·d: each feature is a pair."""
        return 2 * head_dim

    def learned(self, kv_heads: int, head_dim: int) -> dict[str, Float[Tensor, "g d"]]:
        """δ = 0."""
        return {"delta": torch.zeros(kv_heads, head_dim)}

    def query_features(self, q: Float[Tensor, "b h t d"]) -> Float[Tensor, "b h t wide"]:
        """(softplus(q), 0)."""
        size = F.softplus(q)
        return self._paired(size, torch.zeros_like(size))

    def key_features(
        self, k: Float[Tensor, "b g s d"], learned: Mapping[str, Tensor]
    ) -> Float[Tensor, "b g s wide"]:
        """softplus(k)·(cos δ, sin δ)."""
        size, delta = F.softplus(k), learned["delta"].to(k.dtype)[:, None]
        return self._paired(size * delta.cos(), size * delta.sin())

    def _paired(self, one: Tensor, other: Tensor) -> Tensor:
        """Both parts of a pair where the layout has them."""
        if self.layout == "half":
            return torch.cat((one, other), -1)
        return torch.stack((one, other), -1).flatten(-2)


@register
class RotateFirst(Part):
    """N(P x) instead of P N(x): the gain of a normalisation then meets rotated features.

    Without gain and mean both are the same: a rotation keeps lengths. With either the score does
    not depend on the distance alone.
    """

    slot = Slot.ORDER
    name = "RotateFirst"
    summary = "rotate, then normalise"
    equation = "s = λ·⟨N_q(P_i q), N_k(P_j k)⟩"
    source = "the order of Llama 4 and Hunyuan"
    needs_rotary = True

    def conflict(self, parts: Parts) -> str | None:
        """It needs a normalisation, and a rotation that keeps lengths."""
        variant, position = parts[Slot.VARIANT], parts[Slot.POSITION]
        assert isinstance(variant, Variant)
        if variant.query_norm() is None and variant.key_norm() is None:
            return (
                f"RotateFirst on {variant.name} makes no sense: {variant.name} normalises nothing, "
                "so there is no order to choose"
            )
        if isinstance(position, RotaryPosition) and position.log_growth(2) is not None:
            return (
                f"RotateFirst on {position.name} makes no sense: what grows with the position "
                "would be normalised away, and the score would not depend on the distance alone"
            )
        return None
