"""QKLayerNorm, QKRMSNorm and their one-sided forms: normalise features, keep 1/√d."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from normattn.score.normalisation import Across, Normalisation
from normattn.score.part import Variant
from normattn.score.registry import register


@dataclass(frozen=True)
class _FeatureNormVariant(Variant):
    """Parameters: `gain` (learned, per feature), `across` ("head" or "all" heads), `eps`."""

    kind: ClassVar[str]
    sides: ClassVar[str]
    gain: bool = True
    across: Across = "head"
    eps: float = 1e-6

    def __post_init__(self) -> None:
        self.require(math.isfinite(self.eps) and self.eps >= 0, "eps", "a number of at least 0")
        self.require(self.across in ("head", "all"), "across", "'head' or 'all'")

    def _norm(self) -> Normalisation:
        kind = "layer" if self.kind == "layer" else "rms"
        return Normalisation(kind, self.gain, self.across, self.eps)  # type: ignore[arg-type]

    def query_norm(self) -> Normalisation | None:
        """LayerNorm or RMSNorm where the name holds Q."""
        return self._norm() if "Q" in self.sides else None

    def key_norm(self) -> Normalisation | None:
        """LayerNorm or RMSNorm where the name holds K."""
        return self._norm() if "K" in self.sides else None


def _define(sides: str, kind: str, title: str, formula: str) -> type[_FeatureNormVariant]:
    """One class per side and norm, so that each has a name of its own."""
    who = {"QK": "queries and keys", "Q": "queries", "K": "keys"}[sides]
    left = "N(q)" if "Q" in sides else "q"
    right = "N(k)" if "K" in sides else "k"
    body = {
        "__doc__": f"{title} on {who}: s = ⟨{left}, {right}⟩/√d, N(x) = {formula}.",
        "__module__": __name__,
        "name": f"{sides}{title}",
        "kind": kind,
        "sides": sides,
        "summary": f"{title} on {who}, scale 1/√d",
        "equation": f"s = ⟨{left}, {right}⟩ / √d, N(x) = {formula}",
        "source": "arXiv 2010.04245, 2302.05442",
    }
    part: type[_FeatureNormVariant] = register(
        dataclass(frozen=True)(type(f"{sides}{title}", (_FeatureNormVariant,), body))
    )
    globals()[part.__name__] = part  # where pickle looks for it
    return part


for _sides in ("QK", "Q", "K"):
    _define(_sides, "layer", "LayerNorm", "(x − mean)/√(var + eps)·g + b")
    _define(_sides, "rms", "RMSNorm", "x/√(mean x² + eps)·g")
