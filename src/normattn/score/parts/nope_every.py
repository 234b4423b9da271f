"""NoPEEvery: some layers without positions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from normattn.score.outer_parts import LayoutPart
from normattn.score.part import Part, Slot
from normattn.score.parts.hwfa import bias_conflict, without_position
from normattn.score.registry import register


@register
@dataclass(frozen=True)
class NoPEEvery(LayoutPart):
    """Layers every, 2·every, … (1-based) have no position, the others RoPE (arXiv 2501.18795).

    The layers without position see all keys, also where the others have a window; post-hoc methods
    that change rotary positions leave them alone. SmolLM3 has every = 4.
    """

    name: ClassVar[str] = "NoPEEvery"
    summary: ClassVar[str] = "every so many layers one without positions"
    equation: ClassVar[str] = "layers every, 2·every, …: P = 1"
    source: ClassVar[str] = "arXiv 2501.18795; SmolLM3"
    used_by: ClassVar[str] = "SmolLM3"
    needs_rotary: ClassVar[bool] = True
    every: int = 4

    def __post_init__(self) -> None:
        self.require(self.every >= 2, "every", "at least 2 (every layer without: NoPE)")

    def conflict(self, parts: Mapping[Slot, Part]) -> str | None:
        """A layer without position has no bias either."""
        return bias_conflict(self, parts)

    def layer(
        self, parts: Mapping[Slot, Part], layer: int, layers: int, train_length: int | None
    ) -> Iterable[Part]:
        """NoPE where the layer's number, from 1, is a multiple of `every`."""
        return (without_position(parts) if (layer + 1) % self.every == 0 else parts).values()
