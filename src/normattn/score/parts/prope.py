"""PRoPE: the lowest frequencies do not turn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from normattn.score.folded_parts import RotaryPosition
from normattn.score.registry import register


@register
@dataclass(frozen=True)
class PRoPE(RotaryPosition):
    """p-RoPE: θ_m = base^(−2m/d) for m < ⌊p·d/2⌋ and 0 from there on (arXiv 2410.06205).

    `fraction` p of the pairs turn, the fastest ones, with the frequencies of the whole head. That
    is not `PartialRoPE`, where p·d features turn with those of a head of that size.
    p = 1 is RoPE, its limit at 0 NoPE.
    """

    name: ClassVar[str] = "PRoPE"
    summary: ClassVar[str] = "rotary position whose lowest frequencies do not turn"
    equation: ClassVar[str] = "θ_m = base^(−2m/d) for m < ⌊p·d/2⌋, else 0"
    source: ClassVar[str] = "arXiv 2410.06205; transformers: rope_type proportional"
    used_by: ClassVar[str] = "Gemma 4"
    fraction: float = 0.75

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(0 < self.fraction <= 1, "fraction", "above 0 and at most 1")

    def turning(self, theta: Float[Tensor, "half"]) -> Float[Tensor, "half"]:
        """θ_m for the first ⌊p·d/2⌋ pairs, 0 for the others."""
        kept = int(self.fraction * 2 * theta.numel() // 2)
        return torch.where(torch.arange(theta.numel(), device=theta.device) < kept, theta, 0.0)
