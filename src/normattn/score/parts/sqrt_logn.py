"""SqrtLogN: scale grows with the square root of the logarithm of the visible keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from normattn.score.folded_parts import LogNPart
from normattn.score.part import When
from normattn.score.parts.logn import log_ratio
from normattn.score.registry import register


@register
@dataclass(frozen=True)
class SqrtLogN(LogNPart):
    """λ · √(ln n / ln L) at every position, the slowest law in use (arXiv 2605.12697).

    Logits of independent normal keys reach √(2 ln n) standard deviations, so that this is the
    scale at which the largest of them neither fades nor takes all. As with `logn`, λ is unchanged
    at n = L; CosA keeps its own base.
    """

    name: ClassVar[str] = "SqrtLogN"
    summary: ClassVar[str] = "scale grows with the square root of the logarithm of the visible keys"
    equation: ClassVar[str] = "λ ← λ · √(ln n / ln L)"
    source: ClassVar[str] = "arXiv 2605.12697"
    when: ClassVar[When] = "trained-in"

    def factor(self, n: Float[Tensor, "..."], train_length: int | None) -> Float[Tensor, "..."]:
        """√(ln n / ln L)."""
        return log_ratio(n, train_length).sqrt()
