"""RoPE: rotary position, the default of every specification."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from jaxtyping import Float
from torch import Tensor

from normattn.score.folded_parts import RotaryPosition
from normattn.score.registry import register


@register
@dataclass(frozen=True)
class RoPE(RotaryPosition):
    """Rotate feature pair m of position i by the angle i·base^(−2m/d) (kexue.fm/archives/8265).

    `layout="half"` pairs feature m with m + d/2, `layout="interleaved"` pairs 2m with 2m + 1.
    `direction="backward"` turns by the negative angle, as nanochat does: the same as RoPE of
    features whose pairs are swapped, so a model trained with one is not read with the other.
    """

    name: ClassVar[str] = "RoPE"
    summary: ClassVar[str] = "rotary position (the default)"
    equation: ClassVar[str] = "P_i: pair m turned by i·base^(−2m/d), or by −i·base^(−2m/d)"
    source: ClassVar[str] = "kexue.fm/archives/8265, arXiv 2104.09864"
    used_by: ClassVar[str] = "Llama, Mistral, Qwen and most open decoders since 2021"
    direction: Literal["forward", "backward"] = "forward"

    def __post_init__(self) -> None:
        super().__post_init__()
        known = ("forward", "backward")
        self.require(self.direction in known, "direction", "'forward' or 'backward'")

    def turning(self, theta: Float[Tensor, "half"]) -> Float[Tensor, "half"]:
        """θ_m, or −θ_m backward."""
        return theta if self.direction == "forward" else -theta
