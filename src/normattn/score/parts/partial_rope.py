"""PartialRoPE: only some of the features turn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from normattn.score.folded_parts import RotaryPosition
from normattn.score.registry import register


@register
@dataclass(frozen=True)
class PartialRoPE(RotaryPosition):
    """RoPE of the first fraction·d features, the others without position (arXiv 2204.06745).

    The number that turns is rounded down to an even one, and is at least 2; frequencies are those
    of a head of that size.
    """

    name: ClassVar[str] = "PartialRoPE"
    summary: ClassVar[str] = "rotary position on some of the features"
    equation: ClassVar[str] = "P_i: RoPE on the first r = 2⌊fraction·d/2⌋ features"
    source: ClassVar[str] = "arXiv 2204.06745 (GPT-NeoX)"
    used_by: ClassVar[str] = "GPT-NeoX, Phi"
    fraction: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(0 < self.fraction <= 1, "fraction", "above 0 and at most 1")

    def rotated(self, head_dim: int) -> int:
        """2⌊fraction·d/2⌋, at least 2."""
        return max(2, int(self.fraction * head_dim) // 2 * 2)
