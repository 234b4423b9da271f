"""IRoPE: every so many layers one without positions and norm, whose logits are sharpened."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from normattn.score.outer_parts import LayoutPart
from normattn.score.own_scale import OwnScale
from normattn.score.part import Part, Slot
from normattn.score.parts.baseline import Baseline
from normattn.score.parts.hwfa import bias_conflict, without_position
from normattn.score.parts.temperature import Temperature
from normattn.score.registry import register


@register
@dataclass(frozen=True)
class IRoPE(LayoutPart):
    """Layers every, 2·every, … (1-based): NoPE, no norm, λ · (1 + β·ln(1 + ⌊(i + 1)/L₀⌋)).

    The other layers are as named; a chosen `scale` is that of all. `beta` β = 0 leaves the logits
    as they are, `length` is L₀ (Llama 4).
    """

    name: ClassVar[str] = "IRoPE"
    summary: ClassVar[str] = "every so many layers one without positions, sharper with the position"
    equation: ClassVar[str] = "layers every, 2·every, …: P = N = 1, λ · (1 + β·ln(1 + ⌊(i+1)/L₀⌋))"
    source: ClassVar[str] = "transformers: llama4"
    used_by: ClassVar[str] = "Llama 4"
    needs_rotary: ClassVar[bool] = True
    every: int = 4
    beta: float = 0.1
    length: int = 8192

    def __post_init__(self) -> None:
        self.require(self.every >= 2, "every", "at least 2")
        Temperature(self.beta, self.length)

    def conflict(self, parts: Mapping[Slot, Part]) -> str | None:
        """A layer without position has no bias, and its own temperature."""
        if Slot.LOGN in parts:
            return f"IRoPE and {parts[Slot.LOGN].name} cannot be combined: IRoPE has its own λ(i)"
        return bias_conflict(self, parts)

    def layer(
        self, parts: Mapping[Slot, Part], layer: int, layers: int, train_length: int | None
    ) -> Iterable[Part]:
        """Baseline-NoPE with its temperature where the layer's number is a multiple of `every`."""
        if (layer + 1) % self.every:
            return parts.values()
        variant = parts[Slot.VARIANT]
        scale = variant.scale if isinstance(variant, OwnScale) else None
        own = {**without_position(parts), Slot.VARIANT: Baseline(scale=scale)}
        own.pop(Slot.ORDER, None)
        if self.beta:
            own[Slot.LOGN] = Temperature(self.beta, self.length, shift=1)
        return own.values()
