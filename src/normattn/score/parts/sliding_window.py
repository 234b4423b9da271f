"""SlidingWindow: keys near by only."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from normattn.score.outer_parts import VisiblePart
from normattn.score.part import Part, Slot
from normattn.score.registry import register


@register
@dataclass(frozen=True)
class SlidingWindow(VisiblePart):
    """Keys with |i − j| < window are seen (arXiv 2004.05150, 2310.06825).

    `window` defaults to L // 4. n, of which log-n is made, does not count the window. `stretched`
    says that the model was trained with a stretched spectrum here too (gpt-oss).
    """

    name: ClassVar[str] = "SlidingWindow"
    summary: ClassVar[str] = "only keys within a window are seen"
    equation: ClassVar[str] = "j is seen by i where |i−j| < w"
    source: ClassVar[str] = "arXiv 2004.05150, 2310.06825"
    used_by: ClassVar[str] = "Mistral 7B; in some layers Gemma 2, Gemma 3, gpt-oss"
    stretched: bool = False

    def __post_init__(self) -> None:
        if self.window is not None:
            self.require(self.window >= 1, "window", "at least 1")

    def resolved(self, train_length: int | None, factor: float | None) -> SlidingWindow:
        """window = L // 4 where none was given."""
        if self.window is None and train_length is not None:
            return dataclasses.replace(self, window=max(1, train_length // 4))
        return self

    def conflict(self, parts: Mapping[Slot, Part]) -> str | None:
        """Nothing is to be stretched, and nothing lies beyond."""
        for slot in (Slot.SPECTRUM, Slot.REGIME):
            if slot in parts and not (self.stretched and slot is Slot.SPECTRUM):
                return (
                    f"{parts[slot].name} cannot be combined with SlidingWindow: no relative "
                    "position passes the window, so none is left to be brought into it"
                )
        return None
