"""CosA: the scaled cosine of query and key."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from normattn.errors import InputError
from normattn.score.folded_parts import Variant
from normattn.score.normalisation import Normalisation
from normattn.score.registry import register


@register
@dataclass(frozen=True)
class CosA(Variant):
    """s(i, j) = c·ln m · cos(q_i, k_j), c = 4 (kexue.fm/archives/9859; 3.5 in the older post).

    m = L/2 with training length L; with `-logn`, m = n, the number of visible keys, which there
    replaces m and multiplies nothing.
    """

    name: ClassVar[str] = "CosA"
    summary: ClassVar[str] = "cosine of query and key, scale c·ln m"
    equation: ClassVar[str] = "s = c·ln m · ⟨q/‖q‖, k/‖k‖⟩, m = L/2 (−logn: m = n)"
    source: ClassVar[str] = "kexue.fm/archives/9859"
    logn_replaces_base: ClassVar[bool] = True
    c: float = 4.0

    def __post_init__(self) -> None:
        self.require(math.isfinite(self.c) and self.c > 0, "c", "a number above 0")

    def missing(self, train_length: int | None) -> str | None:
        """m = L/2 needs the training length."""
        return "train_length" if train_length is None else None

    def query_norm(self) -> Normalisation | None:
        """L2."""
        return Normalisation("l2")

    def key_norm(self) -> Normalisation | None:
        """L2."""
        return Normalisation("l2")

    def base(self, head_dim: int, train_length: int | None) -> float:
        """c·ln(L/2)."""
        if train_length is None:
            raise InputError("CosA needs the training length: its scale is c·ln(L/2)")
        return self.c * math.log(train_length / 2)

    def base_at(self, n: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """c·ln n."""
        return n.log() * self.c
