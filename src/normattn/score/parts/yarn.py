"""YaRN: interpolate the slow frequencies, keep the fast ones, and sharpen the logits."""

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
class YaRN(StretchedSpectrum):
    """θ'_m = ramp·θ_m/s + (1 − ramp)·θ_m, logits × (0.1·ln s + 1)² (arXiv 2309.00071).

    dim(r) = d·ln(L/(2πr))/(2·ln base) is the feature pair that turns r times within L;
    low = ⌊dim(beta_fast)⌋, high = ⌈dim(beta_slow)⌉, both clamped to [0, d − 1] (equal: high +
    0.001); ramp = clamp((m − low)/(high − low), 0, 1). The rotation stays a pure rotation: the
    factor enters λ once. `truncate=false` leaves low and high as they are, without ⌊ ⌋ and ⌈ ⌉
    (gpt-oss); `sharpness` stands in place of 0.1 (0 in Ministral 3).
    """

    name: ClassVar[str] = "YaRN"
    summary: ClassVar[str] = "slow frequencies interpolated, fast ones kept, sharper logits"
    equation: ClassVar[str] = "θ' = ramp·θ/s + (1 − ramp)·θ; λ ← λ·(0.1·ln s + 1)²"
    source: ClassVar[str] = "arXiv 2309.00071"
    used_by: ClassVar[str] = "DeepSeek-V3, gpt-oss; an option of Qwen2.5 and Qwen3"
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    sharpness: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        slow, fast = self.beta_slow, self.beta_fast
        self.require(math.isfinite(slow) and slow > 0, "beta_slow", "a number above 0")
        self.require(
            math.isfinite(fast) and fast >= slow, "beta_fast", "a number of at least beta_slow"
        )
        self.require(
            math.isfinite(self.sharpness) and self.sharpness >= 0, "sharpness", "at least 0"
        )

    def missing(self, train_length: int | None) -> str | None:
        """The ramp needs the training length."""
        return super().missing(train_length) or ("train_length" if train_length is None else None)

    def inverse_frequencies(
        self, head_dim: int, base: float, train_length: int | None
    ) -> Float[Tensor, "half"]:
        """The blend of θ_m/s and θ_m by the ramp."""
        if train_length is None:
            raise InputError("YaRN needs the training length: its ramp counts turns within it")

        def dim(rotations: float) -> float:
            turns = train_length / (2 * math.pi * rotations)
            return head_dim * math.log(turns) / (2 * math.log(base))

        low, high = dim(self.beta_fast), dim(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = (float(min(max(edge, 0), head_dim - 1)) for edge in (low, high))
        high += 0.001 if high == low else 0.0
        m = torch.arange(head_dim // 2, dtype=torch.float64)
        ramp = ((m - low) / (high - low)).clamp(0, 1)
        theta = rope_frequencies(head_dim, base)
        return ramp * theta / self.stretch + (1 - ramp) * theta

    def gain(self, train_length: int | None) -> float:
        """(sharpness·ln s + 1)²: the paper scales queries and keys, the logit takes the square."""
        return (self.sharpness * math.log(self.stretch) + 1) ** 2
