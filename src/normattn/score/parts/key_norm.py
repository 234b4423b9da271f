"""QNA, KNA: L2 normalisation of the queries or of the keys, in place of 1/√d."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from normattn.score.folded_parts import Variant
from normattn.score.normalisation import Normalisation
from normattn.score.registry import register


@register
@dataclass(frozen=True)
class QNA(Variant):
    """Query-normalised attention: s(i, j) = ⟨q_i/‖q_i‖, k_j⟩ (kexue.fm/archives/9859)."""

    name: ClassVar[str] = "QNA"
    summary: ClassVar[str] = "queries of length 1, scale 1"
    equation: ClassVar[str] = "s = ⟨q/‖q‖, k⟩"
    source: ClassVar[str] = "kexue.fm/archives/9859"

    def query_norm(self) -> Normalisation | None:
        """L2."""
        return Normalisation("l2")

    def base(self, head_dim: int, train_length: int | None) -> float:
        """1: the L2 norm replaces 1/√d."""
        return 1.0


@register
@dataclass(frozen=True)
class KNA(Variant):
    """Key-normalised attention (KeyNorm): s(i, j) = ⟨q_i, k_j/‖k_j‖⟩ (kexue.fm/archives/9859)."""

    name: ClassVar[str] = "KNA"
    summary: ClassVar[str] = "keys of length 1, scale 1 (KeyNorm)"
    equation: ClassVar[str] = "s = ⟨q, k/‖k‖⟩"
    source: ClassVar[str] = "kexue.fm/archives/9859"

    def key_norm(self) -> Normalisation | None:
        """L2."""
        return Normalisation("l2")

    def base(self, head_dim: int, train_length: int | None) -> float:
        """1: the L2 norm replaces 1/√d."""
        return 1.0
