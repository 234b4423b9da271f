"""PartialRoPE: only some of the features turn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from normattn.score.folded_parts import RotaryPosition
from normattn.score.registry import register


@register
@dataclass(frozen=True)
class PartialRoPE(RotaryPosition):
    """RoPE of fraction·d features, the others without position (arXiv 2204.06745).

    The number that turns is rounded down to an even one, and is at least 2; frequencies are those
    of a head of that size. `side` says whether the first or the last features turn: the last ones
    do in multi-head latent attention (arXiv 2405.04434), whose keys are of all heads' own features
    and behind them the ones that turn, which all heads share.
    """

    name: ClassVar[str] = "PartialRoPE"
    summary: ClassVar[str] = "rotary position on some of the features"
    equation: ClassVar[str] = (
        "P_i: RoPE on the first, or last, r = max(2, 2⌊fraction·d/2⌋) features"
    )
    source: ClassVar[str] = "arXiv 2204.06745 (GPT-NeoX); side=last: arXiv 2405.04434"
    used_by: ClassVar[str] = "GPT-NeoX, Phi; side=last: DeepSeek-V2 and V3"
    fraction: float = 0.5
    side: Literal["first", "last"] = "first"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(0 < self.fraction <= 1, "fraction", "above 0 and at most 1")
        self.require(self.side in ("first", "last"), "side", "'first' or 'last'")

    def rotated(self, head_dim: int) -> int:
        """max(2, 2⌊fraction·d/2⌋)."""
        return max(2, int(self.fraction * head_dim) // 2 * 2)

    def start(self, head_dim: int) -> int:
        """0, or d − r where the last features turn."""
        return 0 if self.side == "first" else head_dim - self.rotated(head_dim)
