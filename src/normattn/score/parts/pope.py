"""PoPE: content is the size of a feature, position alone its angle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from normattn.score.folded_parts import RotaryPosition
from normattn.score.part import Part, Slot
from normattn.score.registry import register


@register
@dataclass(frozen=True)
class PoPE(RotaryPosition):
    """⟨q, k⟩ = Σ_c softplus(q_c)·softplus(k_c)·cos((i − j)·θ_c − δ_c), θ_c = base^(−c/d).

    Polar coordinates (arXiv 2509.10534): every feature is a complex number of that size, whose
    angle is its position's alone, so d frequencies turn, and what reaches a kernel has 2·d
    features. δ, the bias of the angles, is learned per key head and feature, and starts at 0.
    """

    name: ClassVar[str] = "PoPE"
    summary: ClassVar[str] = "a feature's size is content, its angle is position"
    equation: ClassVar[str] = "⟨q, k⟩ = Σ_c softplus(q_c)·softplus(k_c)·cos((i−j)·θ_c − δ_c)"
    source: ClassVar[str] = "arXiv 2509.10534"
    widens: ClassVar[bool] = True

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

    def conflict(self, parts: Mapping[Slot, Part]) -> str | None:
        """A normalisation of what has been turned would mix sizes and angles."""
        if Slot.ORDER in parts:
            return f"{parts[Slot.ORDER].name} and PoPE cannot be combined: PoPE turns 2·d features"
        return None

    def _paired(self, one: Tensor, other: Tensor) -> Tensor:
        """Both parts of a pair where the layout has them."""
        if self.layout == "half":
            return torch.cat((one, other), -1)
        return torch.stack((one, other), -1).flatten(-2)
