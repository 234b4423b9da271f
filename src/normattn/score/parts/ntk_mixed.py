"""NTKMixed: a base for each frequency (`mixed` in the source)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from normattn.score.folded_parts import StretchedSpectrum, rope_frequencies
from normattn.score.registry import register


@register
@dataclass(frozen=True)
class NTKMixed(StretchedSpectrum):
    """θ'_m = θ_m·exp(−a·(m+1)^b), a = ln s/(d/2)^b (kexue.fm/archives/9706).

    b = 0.625 in the post, 0.75 in its author's patch of Llama.
    """

    name: ClassVar[str] = "NTKMixed"
    summary: ClassVar[str] = "NTK-mixed: each frequency with a base of its own"
    equation: ClassVar[str] = "θ'_m = θ_m·exp(−a(m+1)^b), a = ln s/(d/2)^b"
    source: ClassVar[str] = "kexue.fm/archives/9706"
    b: float = 0.625

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(math.isfinite(self.b) and self.b > 0, "b", "a number above 0")

    def inverse_frequencies(
        self, head_dim: int, base: float, train_length: int | None
    ) -> Float[Tensor, "half"]:
        """θ_m·exp(−a·(m+1)^b)."""
        # a·(m+1)^b as ln s · ((m+1)/(d/2))^b, which no b can overflow.
        half = head_dim // 2
        share = torch.arange(1, half + 1, dtype=torch.float64) / half
        return rope_frequencies(head_dim, base) * torch.exp(-math.log(self.stretch) * share**self.b)
