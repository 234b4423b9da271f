"""ResidualQK: every layer adds its queries and keys to those of the layers below."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from normattn.score.outer_parts import CarryPart
from normattn.score.registry import register


@register
@dataclass(frozen=True)
class ResidualQK(CarryPart):
    """s_n = Q̃_n K̃_nᵀ, Q̃_n = Q_n + Q̃_{n−1}, K̃_n = K_n + K̃_{n−1} (kexue 8027, eq. 3).

    Q_n and K_n are normalised, scaled and turned already. Unlike RealFormer's sum this one has the
    products of a layer's queries with another layer's keys; it is one product of vectors, so any
    kernel serves it.
    """

    name: ClassVar[str] = "ResidualQK"
    summary: ClassVar[str] = "queries and keys are summed up from layer to layer"
    equation: ClassVar[str] = "s_n = ⟨Σ_m λ q_m, Σ_m k_m⟩, m ≤ n"
    source: ClassVar[str] = "kexue.fm/archives/8027 (eq. 3)"
    carries: ClassVar[Literal["scores", "features"]] = "features"
