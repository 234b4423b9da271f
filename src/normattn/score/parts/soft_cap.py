"""SoftCap: a smooth bound on the score."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from normattn.score.outer_parts import CapPart
from normattn.score.registry import register


@register
@dataclass(frozen=True)
class SoftCap(CapPart):
    """s ← cap·tanh(s/cap), before bias and mask (Gemma 2, arXiv 2408.00118)."""

    name: ClassVar[str] = "SoftCap"
    summary: ClassVar[str] = "scores bounded smoothly"
    equation: ClassVar[str] = "s ← cap·tanh(s/cap)"
    source: ClassVar[str] = "arXiv 2408.00118"
    used_by: ClassVar[str] = "Gemma 2"

    def __post_init__(self) -> None:
        self.require(math.isfinite(self.cap) and self.cap > 0, "cap", "a number above 0")
