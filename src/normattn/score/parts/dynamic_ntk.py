"""DynamicNTK: NTK-aware scaling that grows with the row that reads."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from normattn.errors import InputError
from normattn.score.folded_parts import SpectrumPart
from normattn.score.parts.ntk import NTK
from normattn.score.registry import register


@register
@dataclass(frozen=True)
class DynamicNTK(SpectrumPart):
    """base' = base·(s·n/L − (s − 1))^(d/(d−2)), row i reading with n = L·⌈(i + 1)/L⌉.

    Rows of a block of L share a spectrum, so prefill, decode and one full forward agree; a cache
    keeps keys un-rotated. In the first block it is the trained spectrum, in block b (0-based) NTK
    with the factor 1 + s·b. s is `factor`, by default 1: stretched by exactly n / L. The factor of
    a table is not taken: it is for spectra that must be told how far they will read.
    """

    name: ClassVar[str] = "DynamicNTK"
    summary: ClassVar[str] = "NTK-aware scaling that grows by blocks of the training length"
    equation: ClassVar[str] = "θ'_m = (base·(s·n/L − (s − 1))^(d/(d−2)))^(−2m/d), n = L·⌈(i + 1)/L⌉"
    source: ClassVar[str] = "arXiv 2309.00071 (section 3.3), kexue.fm/archives/9708"
    used_by: ClassVar[str] = "an option of many RoPE decoders in transformers"
    moving: ClassVar[bool] = True
    factor: float = 1.0

    def __post_init__(self) -> None:
        self.require(math.isfinite(self.factor) and self.factor > 0, "factor", "a number above 0")

    def missing(self, train_length: int | None) -> str | None:
        """The blocks are of the training length."""
        return "train_length" if train_length is None else None

    def at(self, block: int, train_length: int) -> SpectrumPart:
        """NTK with the factor 1 + s·block."""
        return NTK(1 + self.factor * block)

    def inverse_frequencies(
        self, head_dim: int, base: float, train_length: int | None
    ) -> Float[Tensor, "half"]:
        """Refused: there is one spectrum a block, `at(block, train_length)`."""
        raise InputError("DynamicNTK has a spectrum for each block of rows: take at(block, L)")
