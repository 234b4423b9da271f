"""Llama3: the spectrum of Llama 3.1, slow frequencies divided, fast ones kept."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from normattn.errors import InputError
from normattn.score.folded_parts import StretchedSpectrum, rope_frequencies
from normattn.score.registry import register


@register
@dataclass(frozen=True)
class Llama3(StretchedSpectrum):
    """θ'_m = (1 − t)·θ_m/s + t·θ_m, t = clamp((L·θ_m/2π − low)/(high − low), 0, 1).

    L·θ_m/2π is how often pair m turns within the training length: pairs that turn less than `low`
    times are interpolated, those above `high` kept (Llama 3.1, arXiv 2407.21783).
    """

    name: ClassVar[str] = "Llama3"
    summary: ClassVar[str] = "the spectrum of Llama 3.1: interpolated by the turns within L"
    equation: ClassVar[str] = (
        "θ'_m = (1 − t)·θ_m/s + t·θ_m, t = clamp((L·θ_m/2π − low)/(high − low), 0, 1)"
    )
    source: ClassVar[str] = "arXiv 2407.21783; github.com/meta-llama/llama-models"
    used_by: ClassVar[str] = "Llama 3.1, 3.2 and 3.3"
    low: float = 1.0
    high: float = 4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(math.isfinite(self.low) and self.low > 0, "low", "a number above 0")
        self.require(
            math.isfinite(self.high) and self.high > self.low, "high", "a number above low"
        )

    def missing(self, train_length: int | None) -> str | None:
        """The turns are counted within the training length."""
        return super().missing(train_length) or ("train_length" if train_length is None else None)

    def inverse_frequencies(
        self, head_dim: int, base: float, train_length: int | None
    ) -> Float[Tensor, "half"]:
        """The blend of θ_m/s and θ_m by the number of turns."""
        if train_length is None:
            raise InputError("Llama3 needs the training length: it counts turns within it")
        theta = rope_frequencies(head_dim, base)
        turns = theta * (train_length / (2 * math.pi))
        kept = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
        return (1 - kept) * theta / self.stretch + kept * theta
