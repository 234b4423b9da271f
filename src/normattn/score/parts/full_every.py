"""FullEvery: windowed layers, and every so many layers one that sees all keys."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from normattn.errors import InputError
from normattn.score.folded_parts import RotaryPosition
from normattn.score.outer_parts import LayoutPart
from normattn.score.part import Part, Slot
from normattn.score.parts.pi import PI
from normattn.score.parts.sliding_window import SlidingWindow
from normattn.score.registry import register


@register
@dataclass(frozen=True)
class FullEvery(LayoutPart):
    """Layers every, 2·every, … (1-based) see all keys, the others those within a window.

    `window` defaults to L // 4. Full layers may have a rotary `base` of their own, and positions
    divided by `stretch` (Gemma 3: base 10⁶, divided by 8, every sixth layer; arXiv 2503.19786).
    A spectrum changes the full layers alone, as post-hoc methods should; `stretched` says that the
    model was trained with it in its windowed layers too (gpt-oss).
    """

    name: ClassVar[str] = "FullEvery"
    summary: ClassVar[str] = "windowed layers, and every so many layers one that sees all keys"
    equation: ClassVar[str] = "layers every, 2·every, …: all j ≤ i; the others: |i−j| < w"
    source: ClassVar[str] = "arXiv 2408.00118, 2503.19786, 2508.10925"
    used_by: ClassVar[str] = "Gemma 2 and 3, gpt-oss"
    uniform: ClassVar[bool] = False
    every: int = 2
    window: int | None = None
    base: float | None = None
    stretch: float = 1.0
    stretched: bool = False

    def __post_init__(self) -> None:
        self.require(self.every >= 2, "every", "at least 2 (every layer full: no window)")
        self.require(self.window is None or self.window >= 1, "window", "at least 1")
        good = self.base is None or (math.isfinite(self.base) and self.base > 1)
        self.require(good, "base", "a number above 1")
        self.require(
            math.isfinite(self.stretch) and self.stretch >= 1, "stretch", "a number of at least 1"
        )

    def resolved(self, train_length: int | None, factor: float | None) -> FullEvery:
        """window = L // 4 where none was given."""
        if self.window is None and train_length is not None:
            return dataclasses.replace(self, window=max(1, train_length // 4))
        return self

    def missing(self, train_length: int | None) -> str | None:
        """The window, or the training length that gives it."""
        return "window" if self.window is None and train_length is None else None

    def conflict(self, parts: Mapping[Slot, Part]) -> str | None:
        """It has a window and perhaps a base of its own."""
        if Slot.VISIBLE in parts:
            return f"{parts[Slot.VISIBLE].name} and FullEvery cannot be combined: FullEvery has one"
        if self.stretch != 1 and Slot.SPECTRUM in parts:
            return (
                f"FullEvery(stretch={self.stretch:g}) and {parts[Slot.SPECTRUM].name} cannot be "
                "combined: both stretch the full layers"
            )
        turning = isinstance(parts.get(Slot.POSITION), RotaryPosition)
        if (self.base is not None or self.stretch != 1) and not turning:
            return (
                "FullEvery(base=…, stretch=…) without rotary positions makes no sense: both change "
                "them"
            )
        return None

    def layer(
        self, parts: Mapping[Slot, Part], layer: int, layers: int, train_length: int | None
    ) -> Iterable[Part]:
        """A window in all layers but those whose number, from 1, is a multiple of `every`."""
        own = dict(parts)
        if (layer + 1) % self.every:
            if self.window is None:
                raise InputError("FullEvery needs window=… or a training length")
            own.pop(Slot.REGIME, None)
            if not self.stretched:
                own.pop(Slot.SPECTRUM, None)
            stretched = Slot.SPECTRUM in own
            own[Slot.VISIBLE] = SlidingWindow(self.window, stretched)
            return own.values()
        position = own[Slot.POSITION]
        if self.base is not None and isinstance(position, RotaryPosition):
            own[Slot.POSITION] = dataclasses.replace(position, base=self.base)
        if self.stretch != 1:
            own[Slot.SPECTRUM] = PI(factor=self.stretch)
        return own.values()
