"""LongRoPE: a rescale factor of its own for each frequency."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from normattn.errors import InputError
from normattn.score.folded_parts import StretchedSpectrum, rope_frequencies
from normattn.score.registry import register


@register
@dataclass(frozen=True)
class LongRoPE(StretchedSpectrum):
    """θ'_m = θ_m/λ_m, logits × (1 + ln s/ln L) (arXiv 2402.13753).

    `factors` are λ_0 … λ_{d/2−1}, found by a search of the paper and shipped with a model, written
    1:1.2:4. Without them λ_m = s^(2m/(d−2)), those of NTK, one of the points where that search
    starts. The paper multiplies cos and sin by √(1 + ln s/ln L), so the logit by its square. Its
    first n̂ tokens, which stay unstretched, are not modelled.
    """

    name: ClassVar[str] = "LongRoPE"
    summary: ClassVar[str] = "a searched divisor for each frequency, sharper logits"
    equation: ClassVar[str] = "θ'_m = θ_m/λ_m; λ ← λ·(1 + ln s/ln L)"
    source: ClassVar[str] = "arXiv 2402.13753"
    used_by: ClassVar[str] = "Phi-3 and Phi-4-mini, long-context releases"
    factors: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.factors is not None:
            good = all(math.isfinite(factor) and factor > 0 for factor in self.factors)
            self.require(good and bool(self.factors), "factors", "numbers above 0, like 1:1.2:4")

    def missing(self, train_length: int | None) -> str | None:
        """The factor and the training length, of which the gain is made."""
        if self.factor is None:
            return "factor"
        return "train_length" if train_length is None else None

    def inverse_frequencies(
        self, head_dim: int, base: float, train_length: int | None
    ) -> Float[Tensor, "half"]:
        """θ_m/λ_m; needs d/2 factors, or d ≥ 4 without them."""
        theta = rope_frequencies(head_dim, base)
        half = head_dim // 2
        if self.factors is None:
            if head_dim < 4:
                raise InputError(
                    f"LongRoPE needs factors=… where the head dimension is below 4: {head_dim}"
                )
            m = torch.arange(half, dtype=torch.float64)
            return theta * self.stretch ** (-m / (half - 1))
        if len(self.factors) != half:
            raise InputError(
                f"LongRoPE needs one factor for each of the {half} pairs that turn, but it has "
                f"{len(self.factors)}"
            )
        return theta / torch.tensor(self.factors, dtype=torch.float64)

    def gain(self, train_length: int | None) -> float:
        """1 + ln s/ln L."""
        if train_length is None:
            raise InputError("LongRoPE needs the training length: its gain is 1 + ln s/ln L")
        return 1 + math.log(self.stretch) / math.log(train_length)
