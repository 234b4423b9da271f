"""DroPE: the rotation that a model was trained with is left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from normattn.score.folded_parts import RotaryPosition, SpectrumPart
from normattn.score.part import Part, Slot
from normattn.score.registry import register


@register
@dataclass(frozen=True)
class DroPE(SpectrumPart):
    """θ'_m = 0: P = 1 in a model trained with RoPE (arXiv 2512.12167).

    The paper goes on training for a short while without positions, which is what makes it work;
    here the value is what that training runs with. Its softmax temperature for long text is no
    part of it: add logn+.
    """

    name: ClassVar[str] = "DroPE"
    summary: ClassVar[str] = "positions left out after training, to be trained on for a while"
    equation: ClassVar[str] = "θ'_m = 0, so P = 1"
    source: ClassVar[str] = "arXiv 2512.12167"

    def conflict(self, parts: Mapping[Slot, Part]) -> str | None:
        """A decay by distance would stay."""
        position = parts.get(Slot.POSITION)
        if isinstance(position, RotaryPosition) and position.log_growth(2) is not None:
            return (
                f"DroPE and {position.name} cannot be combined: without its rotation "
                f"{position.name} is still a position, by its decay"
            )
        return None

    def inverse_frequencies(
        self, head_dim: int, base: float, train_length: int | None
    ) -> Float[Tensor, "half"]:
        """All 0."""
        return torch.zeros(head_dim // 2, dtype=torch.float64)
