"""Transformations of values before attention, and of its outputs.

Legend: B batch, H heads, T queries, S keys, D head dimension, E value size, R clipped distances.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from normattn.kernels import AttentionMask
from normattn.kernels.inputs import PairBias, PairValues
from normattn.kernels.numerics import at_least_float32
from normattn.score.parts.base import Part, Parts, Slot, number, one_of, register
from normattn.score.parts.bias import Learned, PairBiasPart, Queries, require_query
from normattn.score.parts.residual import ResidualPart
from normattn.score.parts.softmax import Differential, Outputs


@dataclass(frozen=True)
class OwnValues(Part):
    """A component that needs separate values for each head."""

    def conflict(self, parts: Parts) -> str | None:
        """Differential pairs concatenate the values of two heads."""
        pairs = parts.get(Slot.NORMALISER)
        if isinstance(pairs, Differential):
            return self.refusal(pairs, "the values of two heads are concatenated")
        return super().conflict(parts)


@dataclass(frozen=True)
class ValuePart(OwnValues):
    """A transformation of values or outputs; scores do not change."""

    slot = Slot.VALUES


@register
class XSA(ValuePart):
    """The direction of a query's own value is removed from its output.

    This is exclusive self-attention: a token's own information passes through the residual stream,
    and attention adds only what is orthogonal to v_i. Nothing is learned.
    """

    equation = "o_i ← o_i − ⟨o_i, v_i⟩·v_i/‖v_i‖²"
    source = "arXiv 2603.09078"

    def conflict(self, parts: Parts) -> str | None:
        """Values of layers below must not be mixed in."""
        residual = parts.get(Slot.RESIDUAL)
        if isinstance(residual, ResidualPart) and (residual.values or residual.summed == "values"):
            return self.refusal(residual, "the layer's values are mixed with those of layers below")
        return super().conflict(parts)

    def without(self, o: Outputs, own: Outputs) -> Outputs:
        """o without its component along `own`, in float32 or wider; o where `own` is 0."""
        dtype = at_least_float32(o.dtype)
        x, v = o.to(dtype), own.to(dtype)
        square = v.square().sum(-1, keepdim=True)
        share = (x * v).sum(-1, keepdim=True) / torch.where(square > 0, square, 1.0)
        return (x - share * v).to(o.dtype)


@register
class VORoPE(ValuePart):
    """Values are rotated by their position, and outputs are rotated back.

    Rotary position of the second kind: a value enters as R_{j−i} v_j, by its distance. All features
    of a value rotate, with their own `base`. It adds to the score's position; alone it is
    `Baseline-NoPE-VORoPE`.
    """

    equation = "o_i = R_iᵀ·Σ_j a_ij·R_j v_j"
    source = "kexue.fm/archives/10862"
    base: float = number(default=10000.0, above=1)
    layout: Literal["half", "interleaved"] = one_of("half", "interleaved", default="half")


@register
class NEZHA(OwnValues, PairBiasPart):
    """Sinusoids of the distance are added to keys and to values.

    R is one fixed table for all heads: sin and cos of r·10000^(−2m/d) in turn. r is j − i clipped
    to ±M, plus M; `clip` is M. Nothing is learned. Weights are summed by clipped distance,
    so that no number is stored for each pair and feature.
    """

    equation = "s = λ·⟨q_i, k_j + R_ij⟩, o_i = Σ_j a_ij·(v_j + R_ij)"
    source = "arXiv 1909.00204; github.com/huawei-noah, NEZHA-TensorFlow/modeling.py"
    used_by = "NEZHA"
    needs_causal = False
    reads_queries = True
    excludes: ClassVar[Mapping[Slot, str]] = {
        Slot.VALUES: "both change what a value is read as",
    }
    clip: int = number(default=64, least=1)

    def pairs(self, learned: Learned, dtype: torch.dtype, query: Queries | None) -> PairBias:
        """λ·⟨q, R⟩ of each query and clipped distance, looked up by the distance of each pair."""
        q = require_query(self, query).to(dtype)
        table = q @ self._sinusoids(q.shape[-1], q).t()

        def compute(score: Tensor, mask: AttentionMask, table: Tensor) -> Tensor:
            return table.gather(-1, self._rows(score, mask))

        # Per head: the bias, and an index of eight bytes.
        return PairBias(compute, 3 * table.shape[0] * table.shape[1], table)

    def pair_values(self) -> PairValues:
        """R, added to the values: Σ_j a_ij·R_ij, by the sum of the weights at each distance."""

        def weighted_sum(weight: Tensor, size: int, mask: AttentionMask) -> Tensor:
            sums = weight.new_zeros(*weight.shape[:-1], 2 * self.clip + 1)
            sums = sums.scatter_add(-1, self._rows(weight, mask), weight)
            return sums @ self._sinusoids(size, weight)

        return weighted_sum

    def _sinusoids(self, size: int, like: Tensor) -> Float[Tensor, "r e"]:
        """R of all clipped distances, sines and cosines in turn; 0 last if the size is odd."""
        row = torch.arange(2 * self.clip + 1, dtype=torch.float64, device=like.device)
        exponent = torch.arange(0, size - 1, 2, dtype=torch.float64, device=like.device) / size
        angle = row[:, None] * 10000.0**-exponent
        waves = torch.stack((angle.sin(), angle.cos()), -1).flatten(1)
        return torch.nn.functional.pad(waves, (0, size % 2)).to(like.dtype)

    def _rows(self, score: Tensor, mask: AttentionMask) -> Int[Tensor, "b h t s"]:
        """The row of each pair in R: j − i, clipped, plus `clip`."""
        distance = mask.distance(slice(None), slice(None)).clamp(-self.clip, self.clip)
        return (self.clip - distance).expand(score.shape)
