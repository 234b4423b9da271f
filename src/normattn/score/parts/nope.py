"""NoPE: no position at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from normattn.score.folded_parts import PositionPart
from normattn.score.registry import register


@register
@dataclass(frozen=True)
class NoPE(PositionPart):
    """P_i = 1: a causal model learns order from its mask alone (arXiv 2305.19466)."""

    name: ClassVar[str] = "NoPE"
    summary: ClassVar[str] = "no position"
    equation: ClassVar[str] = "P_i = 1"
    source: ClassVar[str] = "arXiv 2305.19466"
