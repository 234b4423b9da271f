"""RotateFirst: normalisation after the rotation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from normattn.score.folded_parts import OrderPart, RotaryPosition, Variant
from normattn.score.part import Part, Slot
from normattn.score.registry import register


@register
@dataclass(frozen=True)
class RotateFirst(OrderPart):
    """N(P x) instead of P N(x): the gain of a normalisation then meets rotated features.

    Without gain and mean both are the same: a rotation keeps lengths. With either the score does
    not depend on the distance alone.
    """

    name: ClassVar[str] = "RotateFirst"
    summary: ClassVar[str] = "rotate, then normalise"
    equation: ClassVar[str] = "s = λ·⟨N_q(P_i q), N_k(P_j k)⟩"
    source: ClassVar[str] = "the order of Llama 4 and Hunyuan"
    needs_rotary: ClassVar[bool] = True

    def conflict(self, parts: Mapping[Slot, Part]) -> str | None:
        """It needs a normalisation, and a rotation that keeps lengths."""
        variant, position = parts[Slot.VARIANT], parts[Slot.POSITION]
        assert isinstance(variant, Variant)
        if variant.query_norm() is None and variant.key_norm() is None:
            return (
                f"RotateFirst on {variant.name} makes no sense: {variant.name} normalises nothing, "
                "so there is no order to choose"
            )
        if isinstance(position, RotaryPosition) and position.log_growth(2) is not None:
            return (
                f"RotateFirst on {position.name} makes no sense: what grows with the position "
                "would be normalised away, and the score would not depend on the distance alone"
            )
        return None
