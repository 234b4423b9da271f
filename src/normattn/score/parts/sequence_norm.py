"""QKBatchNorm, QKInstanceNorm and their one-sided forms: statistics over tokens, not causal."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from normattn.score.normalisation import Normalisation
from normattn.score.part import Variant
from normattn.score.registry import register


@dataclass(frozen=True)
class _SequenceNormVariant(Variant):
    """Parameters: `gain` (learned, per head and feature, with a bias), `eps`."""

    kind: ClassVar[str]
    sides: ClassVar[str]
    gain: bool = True
    eps: float = 1e-5

    def __post_init__(self) -> None:
        self.require(math.isfinite(self.eps) and self.eps >= 0, "eps", "a number of at least 0")

    def _norm(self) -> Normalisation:
        return Normalisation(self.kind, self.gain, eps=self.eps)  # type: ignore[arg-type]

    def query_norm(self) -> Normalisation | None:
        """BatchNorm or InstanceNorm where the name holds Q."""
        return self._norm() if "Q" in self.sides else None

    def key_norm(self) -> Normalisation | None:
        """BatchNorm or InstanceNorm where the name holds K."""
        return self._norm() if "K" in self.sides else None


def _define(sides: str, kind: str, title: str, over: str) -> type[_SequenceNormVariant]:
    """One class per side and norm, so that each has a name of its own."""
    who = {"QK": "queries and keys", "Q": "queries", "K": "keys"}[sides]
    left = "N(q)" if "Q" in sides else "q"
    right = "N(k)" if "K" in sides else "k"
    body = {
        "__doc__": f"{title} on {who}, statistics over {over}; leaks the future.",
        "__module__": __name__,
        "name": f"{sides}{title}",
        "kind": kind,
        "sides": sides,
        "summary": f"{title} on {who}, scale 1/√d; not causal",
        "equation": f"s = ⟨{left}, {right}⟩ / √d, N over {over}",
        "source": "arXiv 1502.03167, 1607.08022; kexue.fm/archives/9859",
    }
    part: type[_SequenceNormVariant] = register(
        dataclass(frozen=True)(type(f"{sides}{title}", (_SequenceNormVariant,), body))
    )
    globals()[part.__name__] = part  # where pickle looks for it
    return part


for _sides in ("QK", "Q", "K"):
    _define(_sides, "batch", "BatchNorm", "batch and tokens")
    _define(_sides, "instance", "InstanceNorm", "the tokens of a row")
