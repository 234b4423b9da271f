"""RealFormer: every layer adds its scores to those of the layers below."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from normattn.score.outer_parts import CarryPart
from normattn.score.registry import register


@register
@dataclass(frozen=True)
class RealFormer(CarryPart):
    """s_n = q_n k_nᵀ·λ + s_{n−1}, over all layers from the lowest on (arXiv 2012.11747).

    What is carried are the products alone: masks, biases, caps and sinks come after, in every layer
    anew. With `running_mean` softmax reads s_n / n, the mean over the layers so far.
    """

    name: ClassVar[str] = "RealFormer"
    summary: ClassVar[str] = "scores are summed up from layer to layer"
    equation: ClassVar[str] = "s_n = λ·⟨q_n, k_n⟩ + s_{n−1} (running_mean: s_n/n)"
    source: ClassVar[str] = "arXiv 2012.11747"
    carries: ClassVar[Literal["scores", "features"]] = "scores"
    running_mean: bool = False

    @property
    def mean(self) -> bool:
        """As `running_mean` says."""
        return self.running_mean
