"""Sink: somewhere to attend to when there is nothing to attend to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from normattn.score.outer_parts import SinkPart
from normattn.score.registry import register


@register
@dataclass(frozen=True)
class Sink(SinkPart):
    """o_i = Σ_j exp(s(i, j)) v_j / (exp(z_h) + Σ_j exp(s(i, j))), z_h learned per head, at first 0.

    z_h = 0 is "softmax off by one" (arXiv 2309.17453, appendix; learned in gpt-oss).
    """

    name: ClassVar[str] = "Sink"
    summary: ClassVar[str] = "one more learned logit per head in the denominator of softmax"
    equation: ClassVar[str] = "o = Σ_j e^{s_j} v_j / (e^{z_h} + Σ_j e^{s_j})"
    source: ClassVar[str] = "arXiv 2309.17453, 2508.10925 (gpt-oss)"
    used_by: ClassVar[str] = "gpt-oss"
