"""HWFA: windowed layers below, one full layer without positions on top."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from normattn.errors import InputError
from normattn.score.outer_parts import LayoutPart
from normattn.score.part import Part, Slot
from normattn.score.parts.logn import LogN
from normattn.score.parts.nope import NoPE
from normattn.score.parts.sliding_window import SlidingWindow
from normattn.score.registry import register


@register
@dataclass(frozen=True)
class HWFA(LayoutPart):
    """All layers but the last see a window w, the last sees all, NoPE and log-n (kexue 9603).

    (w − 1)(layers − 1) + 1 ≤ ¾·L, the training length: what the windowed layers hand upwards
    reaches no further back, so the last layer cannot lean on it. `window` defaults to the largest
    that does; another that does not is refused. Nothing can be stretched afterwards.
    """

    name: ClassVar[str] = "HWFA"
    summary: ClassVar[str] = "windowed layers with positions, then one full layer without"
    equation: ClassVar[str] = "layers 1 … n−1: |i−j| < w; layer n: P = 1, λ ← λ·ln n/ln L"
    source: ClassVar[str] = "kexue.fm/archives/9603"
    needs_rotary: ClassVar[bool] = True
    stretchable: ClassVar[bool] = False
    uniform: ClassVar[bool] = False
    window: int | None = None

    def __post_init__(self) -> None:
        if self.window is not None:
            self.require(self.window >= 1, "window", "at least 1")

    def missing(self, train_length: int | None) -> str | None:
        """The training length; the window waits for the number of layers."""
        return "train_length" if train_length is None else None

    def conflict(self, parts: Mapping[Slot, Part]) -> str | None:
        """It chooses the windows, and its last layer has no position."""
        if Slot.VISIBLE in parts:
            return f"HWFA and {parts[Slot.VISIBLE].name} cannot be combined: HWFA has its window"
        return bias_conflict(self, parts)

    def layer(
        self, parts: Mapping[Slot, Part], layer: int, layers: int, train_length: int | None
    ) -> Iterable[Part]:
        """A window in all layers but the last."""
        window = self._window(layers, train_length)
        if layer < layers - 1:
            return (*parts.values(), SlidingWindow(window))
        return {**without_position(parts), Slot.LOGN: LogN()}.values()

    def _window(self, layers: int, train_length: int | None) -> int:
        """The window, which with those of the layers below reaches at most ¾ of L."""
        if train_length is None:
            raise InputError("HWFA needs a training length, and nothing gives it")
        reach = 3 * train_length // 4
        most = (reach - 1) // max(layers - 1, 1) + 1
        if self.window is None:
            return most
        if self.window > most and layers > 1:
            raise InputError(
                f"HWFA(window={self.window}) with {layers} layers reaches "
                f"{(self.window - 1) * (layers - 1) + 1} tokens back, but it must be at most three "
                f"quarters of the training length {train_length}: window at most {most}"
            )
        return self.window


def without_position(parts: Mapping[Slot, Part]) -> dict[Slot, Part]:
    """The parts of a full layer with NoPE: without a window and what needs a rotary position."""
    kept: dict[Slot, Part] = {
        slot: part
        for slot, part in parts.items()
        if slot is not Slot.VISIBLE and not part.needs_rotary
    }
    kept[Slot.POSITION] = NoPE()
    return kept


def bias_conflict(layout: LayoutPart, parts: Mapping[Slot, Part]) -> str | None:
    """Why a layout with layers that have no position takes no bias."""
    if Slot.BIAS not in parts:
        return None
    return (
        f"{layout.name} and {parts[Slot.BIAS].name} cannot be combined: some layers of "
        f"{layout.name} have no position, and a bias is one"
    )
