"""NTKOld: the first NTK-aware scaling, a base multiplied by the factor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from normattn.score.folded_parts import StretchedSpectrum, rope_frequencies
from normattn.score.registry import register


@register
@dataclass(frozen=True)
class NTKOld(StretchedSpectrum):
    """base' = base·s (`old` in kexue.fm/archives/9708), typed NTK-old.

    The lowest frequency is divided by s^((d−2)/d), a little less than s.
    """

    name: ClassVar[str] = "NTKOld"
    summary: ClassVar[str] = "NTK-aware scaling as first proposed: base·s"
    equation: ClassVar[str] = "θ'_m = (base·s)^(−2m/d)"
    source: ClassVar[str] = "kexue.fm/archives/9675, 9708"

    def inverse_frequencies(
        self, head_dim: int, base: float, train_length: int | None
    ) -> Float[Tensor, "half"]:
        """(base·s)^(−2m/d)."""
        return rope_frequencies(head_dim, base * self.stretch)
