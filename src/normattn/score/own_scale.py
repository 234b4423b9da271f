"""Variants whose scale a model may choose in place of 1/√d."""

from __future__ import annotations

import math
from dataclasses import dataclass

from normattn.score.folded_parts import Variant


@dataclass(frozen=True)
class OwnScale(Variant):
    """A variant with the parameter `scale`: the constant part of λ, 1/√d where it is not given.

    Gemma 2 and 3 (query_pre_attn_scalar^−½), Granite (attention_multiplier).
    """

    scale: float | None = None

    def __post_init__(self) -> None:
        good = self.scale is None or (math.isfinite(self.scale) and self.scale > 0)
        self.require(good, "scale", "a number above 0")

    def missing(self, train_length: int | None) -> str | None:
        """Nothing: 1/√d needs no more than d."""
        return None

    def base(self, head_dim: int, train_length: int | None) -> float:
        """`scale`, or 1/√d."""
        return super().base(head_dim, train_length) if self.scale is None else self.scale
