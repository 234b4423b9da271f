"""Baseline: the scaled dot product."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from normattn.score.own_scale import OwnScale
from normattn.score.registry import register


@register
@dataclass(frozen=True)
class Baseline(OwnScale):
    """s(i, j) = ⟨q_i, k_j⟩ / √d, or · `scale` (Vaswani et al. 2017, arXiv 1706.03762)."""

    name: ClassVar[str] = "Baseline"
    summary: ClassVar[str] = "no normalisation, scale 1/√d"
    equation: ClassVar[str] = "s = ⟨q, k⟩ / √d"
    source: ClassVar[str] = "arXiv 1706.03762"
