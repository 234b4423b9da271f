"""QKBatchNorm, QKInstanceNorm and their one-sided forms: statistics over tokens, not causal."""

from __future__ import annotations

import math
from dataclasses import dataclass

from normattn.score.normalisation import Normalisation
from normattn.score.sided import SidedNorm, define_sides


@dataclass(frozen=True)
class SequenceNormVariant(SidedNorm):
    """Parameters: `gain` (learned, per head and feature, with a bias), `eps`."""

    gain: bool = True
    eps: float = 1e-5

    def __post_init__(self) -> None:
        self.require(math.isfinite(self.eps) and self.eps >= 0, "eps", "a number of at least 0")

    def normalisation(self) -> Normalisation:
        """BatchNorm or InstanceNorm."""
        return Normalisation(
            "batch" if self.kind == "batch" else "instance", self.gain, eps=self.eps
        )


_SOURCE = "arXiv 1502.03167, 1607.08022; kexue.fm/archives/9859"
for _kind, _title, _over in (
    ("batch", "BatchNorm", "N over batch and tokens"),
    ("instance", "InstanceNorm", "N over the tokens of a row"),
):
    globals().update(
        define_sides(SequenceNormVariant, _kind, _title, _over, _SOURCE, "; not causal")
    )
