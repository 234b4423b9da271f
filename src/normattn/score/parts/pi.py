"""PI: position interpolation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from normattn.score.folded_parts import StretchedSpectrum, rope_frequencies
from normattn.score.registry import register


@register
@dataclass(frozen=True)
class PI(StretchedSpectrum):
    """θ'_m = θ_m / s (arXiv 2306.15595); s is `factor`."""

    name: ClassVar[str] = "PI"
    summary: ClassVar[str] = "position interpolation: every frequency divided by the factor"
    equation: ClassVar[str] = "θ'_m = θ_m / s"
    source: ClassVar[str] = "arXiv 2306.15595, kexue.fm/archives/9675"

    def inverse_frequencies(
        self, head_dim: int, base: float, train_length: int | None
    ) -> Float[Tensor, "half"]:
        """θ_m / s."""
        return rope_frequencies(head_dim, base) / self.stretch
