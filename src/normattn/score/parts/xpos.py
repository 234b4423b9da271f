"""XPos: rotary position with a decay by distance."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from normattn.score.folded_parts import RotaryPosition
from normattn.score.registry import register


@register
@dataclass(frozen=True)
class XPos(RotaryPosition):
    """RoPE whose pair m decays by ζ_m^((i−j)/B), ζ_m = (2m/d + γ)/(1 + γ) (arXiv 2212.10554).

    Queries are multiplied by ζ_m^(i/B), keys by ζ_m^(−j/B), by the absolute position, so that a
    cache may grow; `gamma` γ, `scale` B. A dtype ends the readable length: at about 18 000 tokens
    in float32 with B = 512. Post-hoc spectra change the frequencies and leave the decay.
    """

    name: ClassVar[str] = "XPos"
    summary: ClassVar[str] = "rotary position with a decay by distance"
    equation: ClassVar[str] = "P_i: RoPE, pair m of q × ζ_m^(i/B), of k × ζ_m^(−j/B)"
    source: ClassVar[str] = "arXiv 2212.10554"
    gamma: float = 0.4
    scale: float = 512.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(math.isfinite(self.gamma) and self.gamma > 0, "gamma", "a number above 0")
        self.require(math.isfinite(self.scale) and self.scale > 0, "scale", "a number above 0")

    def log_growth(self, head_dim: int) -> Float[Tensor, "half"] | None:
        """ln ζ_m / B."""
        share = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
        return ((share + self.gamma) / (1 + self.gamma)).log() / self.scale
