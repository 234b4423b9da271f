"""Gate: each head's output multiplied by a gate of the layer's input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from normattn.score.outer_parts import GatePart
from normattn.score.registry import register


@register
@dataclass(frozen=True)
class Gate(GatePart):
    """o_h ← σ(W_g x) ⊙ o_h before the output projection, x the layer's input (arXiv 2505.06708).

    `per` feature, W_g x having H·E features, or per head, H. Sigmoid after softmax·V is the form
    that the paper recommends (its G1) and Qwen3-Next has; `act=softplus` takes ln(1 + eˣ) in place
    of σ, as Laguna does, which may enlarge an output too. W_g belongs to the layers `Attention`
    and `GatedAttentionUnit`; `attention` takes W_g x as its argument `gate`.
    """

    name: ClassVar[str] = "Gate"
    summary: ClassVar[str] = "each head's output is gated by the layer's input"
    equation: ClassVar[str] = "o_h ← σ(W_g x) ⊙ o_h"
    source: ClassVar[str] = "arXiv 2505.06708; act=softplus: transformers: laguna"
    used_by: ClassVar[str] = "Qwen3-Next; act=softplus: Laguna"

    def __post_init__(self) -> None:
        self.require(self.per in ("feature", "head"), "per", "'feature' or 'head'")
        self.require(self.act in ("sigmoid", "softplus"), "act", "'sigmoid' or 'softplus'")
