"""QKNorm2020: cosine attention with one learned scale."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from normattn.score.folded_parts import Variant
from normattn.score.normalisation import Normalisation
from normattn.score.registry import register


@register
@dataclass(frozen=True)
class QKNorm2020(Variant):
    """s(i, j) = g·cos(q_i, k_j), g learned, at first log2(l² − l) (Henry et al., arXiv 2010.04245).

    `length` is l, the 97.5th-percentile length of the training sequences; None takes the training
    length. g is one number per attention layer.
    """

    name: ClassVar[str] = "QKNorm2020"
    summary: ClassVar[str] = "cosine of query and key, learned scale"
    equation: ClassVar[str] = "s = g · ⟨q/‖q‖, k/‖k‖⟩, g₀ = log₂(l² − l)"
    source: ClassVar[str] = "arXiv 2010.04245"
    length: int | None = None

    def __post_init__(self) -> None:
        if self.length is not None:
            self.require(self.length >= 2, "length", "at least 2")

    def resolved(self, train_length: int | None, factor: float | None) -> QKNorm2020:
        """Take l = L where none was given."""
        return QKNorm2020(train_length) if self.length is None else self

    def query_norm(self) -> Normalisation | None:
        """L2."""
        return Normalisation("l2")

    def key_norm(self) -> Normalisation | None:
        """L2."""
        return Normalisation("l2")

    def base(self, head_dim: int, train_length: int | None) -> float:
        """1: the learned scale is multiplied in by the module."""
        return 1.0

    def learned_base(self, train_length: int | None) -> float | None:
        """log2(l² − l)."""
        length = self.length or train_length or 2
        return math.log2(length * length - length)
