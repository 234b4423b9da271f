"""What is done to values before they are read, and to what a query has read of them.

Legend: B batch, H heads, T queries, E value size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from normattn.kernels.numerics import at_least_float32
from normattn.score.parts.base import Part, Parts, Slot, number, one_of, register
from normattn.score.parts.residual import ResidualPart
from normattn.score.parts.softmax import Differential


@dataclass(frozen=True)
class ValuePart(Part):
    """Something done to values or outputs; scores are left alone."""

    slot = Slot.VALUES

    def conflict(self, parts: Parts) -> str | None:
        """Each head reads its own values."""
        pairs = parts.get(Slot.NORMALISER)
        if isinstance(pairs, Differential):
            return self.refusal(pairs, "the values of two heads stand side by side")
        return super().conflict(parts)


@register
class XSA(ValuePart):
    """Of what a query reads, the direction of its own value is taken out.

    That is exclusive self-attention: what a token knows of itself passes by the residual stream,
    and attention hands on what is orthogonal to v_i. Nothing is learned.
    """

    equation = "o_i ← o_i − ⟨o_i, v_i⟩·v_i/‖v_i‖²"
    source = "arXiv 2603.09078"

    def conflict(self, parts: Parts) -> str | None:
        """The value that is read must be the layer's own."""
        residual = parts.get(Slot.RESIDUAL)
        if isinstance(residual, ResidualPart) and (residual.values or residual.summed == "values"):
            return self.refusal(residual, "the values read are mixed with those of layers below")
        return super().conflict(parts)

    def without(
        self, o: Float[Tensor, "b h t e"], own: Float[Tensor, "b h t e"]
    ) -> Float[Tensor, "b h t e"]:
        """o without its part along `own`, in float32 or wider; o where the own value is 0."""
        wide = at_least_float32(o.dtype)
        x, v = o.to(wide), own.to(wide)
        square = v.square().sum(-1, keepdim=True)
        share = (x * v).sum(-1, keepdim=True) / torch.where(square > 0, square, 1.0)
        return (x - share * v).to(o.dtype)


@register
class VORoPE(ValuePart):
    """Values are rotated by their position, and what is read of them is rotated back.

    The rotary position of the second kind: a value is read as R_{j−i} v_j, by its distance. All
    features of a value rotate, with frequencies of their own `base`. It stands beside a position of
    queries and keys; alone it is `NoPE-VORoPE`.
    """

    equation = "o_i = R_iᵀ·Σ_j a_ij·R_j v_j"
    source = "kexue.fm/archives/10862"
    base: float = number(default=10000.0, above=1)
    layout: Literal["half", "interleaved"] = one_of("half", "interleaved", default="half")
