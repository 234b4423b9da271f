"""QKLayerNorm, QKRMSNorm and their one-sided forms: normalise features, keep 1/√d."""

from __future__ import annotations

import math
from dataclasses import dataclass

from normattn.score.normalisation import Across, Normalisation
from normattn.score.sided import SidedNorm, define_sides


@dataclass(frozen=True)
class FeatureNormVariant(SidedNorm):
    """Parameters: `gain` (learned, per feature), `across` (head, all, each), `eps`, `scale`.

    Statistics are those of one head, its gain that of all heads; `across=each` gives each head a
    gain of its own (Command R+), `across=all` takes the heads together (OLMo 2).
    """

    gain: bool = True
    across: Across = "head"
    eps: float = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(math.isfinite(self.eps) and self.eps >= 0, "eps", "a number of at least 0")
        self.require(self.across in ("head", "all", "each"), "across", "head, all or each")

    def normalisation(self) -> Normalisation:
        """LayerNorm or RMSNorm."""
        return Normalisation(
            "layer" if self.kind == "layer" else "rms", self.gain, self.across, self.eps
        )


_SOURCE = "arXiv 2010.04245, 2302.05442"
globals().update(
    define_sides(
        FeatureNormVariant,
        "layer",
        "LayerNorm",
        "N(x) = (x − mean)/√(var + eps)·g + b",
        _SOURCE,
    )
)
globals().update(
    define_sides(FeatureNormVariant, "rms", "RMSNorm", "N(x) = x/√(mean x² + eps)·g", _SOURCE)
)
