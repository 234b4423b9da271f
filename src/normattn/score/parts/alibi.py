"""ALiBi: a penalty that grows linearly with distance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from normattn.score.outer_parts import BiasPart
from normattn.score.registry import register


@register
@dataclass(frozen=True)
class ALiBi(BiasPart):
    """b(h, r) = −m_h·r, m_h = 2^(−8(h + 1)/H), h = 0 … H − 1 (arXiv 2108.12409).

    Where H is no power of two, the slopes of the next lower one come first, then every second one
    of twice that many heads, as in the paper's code.
    """

    name: ClassVar[str] = "ALiBi"
    summary: ClassVar[str] = "a penalty that grows linearly with distance"
    equation: ClassVar[str] = "b = −m_h·|i−j|, m_h = 2^(−8h/H), h = 1 … H"
    source: ClassVar[str] = "arXiv 2108.12409"
    used_by: ClassVar[str] = "BLOOM, MPT"

    def values(
        self, distance: Float[Tensor, " r"], heads: int, learned: Mapping[str, Tensor]
    ) -> Float[Tensor, "h r"]:
        """−m_h·r."""
        slopes = torch.tensor(alibi_slopes(heads), dtype=torch.float64)
        return -slopes.to(distance)[:, None] * distance


def alibi_slopes(heads: int) -> list[float]:
    """m_h of every head."""
    power = 1 << (heads.bit_length() - 1)
    first = [2.0 ** (-8 * h / power) for h in range(1, power + 1)]
    between = [2.0 ** (-8 * h / (2 * power)) for h in range(1, 2 * power + 1, 2)]
    return first + between[: heads - power]
