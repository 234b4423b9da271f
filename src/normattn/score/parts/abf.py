"""ABF: adjusted base frequency."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from normattn.score.folded_parts import SpectrumPart, rope_frequencies
from normattn.score.registry import register


@register
@dataclass(frozen=True)
class ABF(SpectrumPart):
    """θ'_m = base'^(−2m/d) with another base, 500 000 by default (arXiv 2309.16039)."""

    name: ClassVar[str] = "ABF"
    summary: ClassVar[str] = "adjusted base frequency: another rotary base"
    equation: ClassVar[str] = "θ'_m = base'^(−2m/d)"
    source: ClassVar[str] = "arXiv 2309.16039"
    base: float = 500000.0

    def __post_init__(self) -> None:
        self.require(math.isfinite(self.base) and self.base > 1, "base", "a number above 1")

    def inverse_frequencies(
        self, head_dim: int, base: float, train_length: int | None
    ) -> Float[Tensor, "half"]:
        """base'^(−2m/d)."""
        return rope_frequencies(head_dim, self.base)
