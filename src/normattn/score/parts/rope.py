"""RoPE: rotary position, the default of every specification."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from normattn.score.folded_parts import RotaryPosition
from normattn.score.registry import register


@register
@dataclass(frozen=True)
class RoPE(RotaryPosition):
    """Rotate feature pair m of position i by the angle i·base^(−2m/d) (kexue.fm/archives/8265).

    `layout="half"` pairs feature m with m + d/2, `layout="interleaved"` pairs 2m with 2m + 1.
    """

    name: ClassVar[str] = "RoPE"
    summary: ClassVar[str] = "rotary position (the default)"
    equation: ClassVar[str] = "P_i: pair m turned by i·base^(−2m/d)"
    source: ClassVar[str] = "kexue.fm/archives/8265, arXiv 2104.09864"
    used_by: ClassVar[str] = "Llama, Mistral, Qwen, DeepSeek and most open decoders since 2021"
