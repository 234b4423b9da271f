"""NTK: NTK-aware scaled RoPE, a larger base."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from normattn.errors import InputError
from normattn.score.folded_parts import StretchedSpectrum, rope_frequencies
from normattn.score.registry import register


@register
@dataclass(frozen=True)
class NTK(StretchedSpectrum):
    """base' = base·s^(d/(d−2)) (kexue.fm/archives/9675; `fixed` in kexue.fm/archives/9708).

    The lowest frequency is divided by exactly s, the highest stays.
    """

    name: ClassVar[str] = "NTK"
    summary: ClassVar[str] = "NTK-aware scaling: base·s^(d/(d−2))"
    equation: ClassVar[str] = "θ'_m = (base·s^(d/(d−2)))^(−2m/d)"
    source: ClassVar[str] = "kexue.fm/archives/9675, 9706"

    def inverse_frequencies(
        self, head_dim: int, base: float, train_length: int | None
    ) -> Float[Tensor, "half"]:
        """(base·s^(d/(d−2)))^(−2m/d); needs d ≥ 4."""
        if head_dim < 4:
            raise InputError(f"NTK needs a head dimension of at least 4, but it is {head_dim}")
        return rope_frequencies(head_dim, base * self.stretch ** (head_dim / (head_dim - 2)))
