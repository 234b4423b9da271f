"""ReRoPE: relative positions rectified to a window."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from normattn.errors import InputError
from normattn.score.folded_parts import RegimePart
from normattn.score.registry import register


@register
@dataclass(frozen=True)
class ReRoPE(RegimePart):
    """Relative position min(i − j, w): ordinary for i − j < w, R^w q · k beyond (kexue 9708).

    `window` w defaults to L // 4. Causal only.
    """

    name: ClassVar[str] = "ReRoPE"
    summary: ClassVar[str] = "relative positions clipped at a window"
    equation: ClassVar[str] = "s = ⟨R^(min(i−j, w)) q, k⟩"
    source: ClassVar[str] = "kexue.fm/archives/9708"
    window: int | None = None

    def __post_init__(self) -> None:
        if self.window is not None:
            self.require(self.window >= 1, "window", "at least 1")

    def resolved(self, train_length: int | None, factor: float | None) -> ReRoPE:
        """window = L // 4 where none was given."""
        if self.window is None and train_length is not None:
            return dataclasses.replace(self, window=max(1, train_length // 4))
        return self

    def far_positions(
        self, query: Float[Tensor, "*bq t"], key: Float[Tensor, "*bk s"]
    ) -> tuple[Float[Tensor, "*bq t"], Float[Tensor, "*bk s"]]:
        """Queries at w, keys at 0."""
        if self.window is None:
            raise InputError("ReRoPE needs window=…, or a training length to take a quarter of")
        return torch.full_like(query, float(self.window)), torch.zeros_like(key)
