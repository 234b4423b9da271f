"""ResidualQKV: every layer adds its queries, keys and values to those of the layers below."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from normattn.score.outer_parts import CarryPart
from normattn.score.registry import register


@register
@dataclass(frozen=True)
class ResidualQKV(CarryPart):
    """o_n = softmax(Q̃_n K̃_nᵀ) Ṽ_n, X̃_n = X_n + X̃_{n−1} for each of Q, K and V.

    `ResidualQK` with the values summed up too, as readers of kexue 8027 ask. Q_n and K_n are
    normalised, scaled and turned already, V_n is as the layer made it.
    """

    name: ClassVar[str] = "ResidualQKV"
    summary: ClassVar[str] = "queries, keys and values are summed up from layer to layer"
    equation: ClassVar[str] = "s_n = ⟨Σ_m λ q_m, Σ_m k_m⟩, read from Σ_m v_m, m ≤ n"
    source: ClassVar[str] = "kexue.fm/archives/8027 (comments)"
    carries: ClassVar[Literal["scores", "features"]] = "features"
    values: ClassVar[bool] = True
