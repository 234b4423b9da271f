"""FIRE: a learned function of the distance as a share of the position."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from normattn.errors import InputError
from normattn.kernels import Visibility
from normattn.score.outer_parts import PairBiasPart
from normattn.score.registry import register

# Keeps the share finite where c reaches 0.
_EPS = 1e-6


@register
@dataclass(frozen=True)
class FIRE(PairBiasPart):
    """b(h, i, j) = f_h(ψ(i − j)/ψ(max(μ·T, i))), ψ(x) = ln(1 + c·x) (arXiv 2310.04418).

    f is a network of one hidden layer, `width` ReLUs and an output for each head; c, at first 0.1,
    and μ, at first 1, are learned, in their size. Up to position μ·T the share is one of μ·T, past
    it one of i: no share is ever larger than in training. `threshold` T defaults to L // 4, as the
    paper trains 2048 tokens with 512. Causal only.
    """

    name: ClassVar[str] = "FIRE"
    summary: ClassVar[str] = "a learned function of the distance as a share of the position"
    equation: ClassVar[str] = "b = f_h(ψ(i−j) / ψ(max(μT, i))), ψ(x) = ln(1 + c·x)"
    source: ClassVar[str] = "arXiv 2310.04418"
    threshold: int | None = None
    width: int = 32

    def __post_init__(self) -> None:
        self.require(self.threshold is None or self.threshold >= 1, "threshold", "at least 1")
        self.require(self.width >= 1, "width", "at least 1")

    def resolved(self, train_length: int | None, factor: float | None) -> FIRE:
        """threshold = L // 4 where none was given."""
        if self.threshold is None and train_length is not None:
            return dataclasses.replace(self, threshold=max(1, train_length // 4))
        return self

    def learned(self, heads: int, head_dim: int) -> dict[str, Tensor]:
        """c, μ, and weights drawn as torch draws a linear layer's, from its global generator."""
        bound = 1 / math.sqrt(self.width)
        return {
            "c": torch.tensor(0.1),
            "mu": torch.tensor(1.0),
            "w_in": torch.empty(self.width).uniform_(-1, 1),
            "b_in": torch.empty(self.width).uniform_(-1, 1),
            "w_out": torch.empty(heads, self.width).uniform_(-bound, bound),
            "b_out": torch.empty(heads).uniform_(-bound, bound),
        }

    def pairs(
        self, learned: Mapping[str, Tensor], dtype: torch.dtype, query: Tensor | None
    ) -> Shares:
        """f of the share of each pair."""
        if self.threshold is None:
            raise InputError("FIRE needs threshold=…, the position from which distances are shares")
        return Shares(self.threshold, {name: x.to(dtype) for name, x in learned.items()})


@dataclass(frozen=True)
class Shares:
    """FIRE's bias with what it has learned."""

    threshold: int
    learned: Mapping[str, Tensor]

    @property
    def width(self) -> int:
        """The hidden layer and the outputs of a pair."""
        return sum(self.learned["w_out"].shape)

    def part(self, rows: slice) -> Shares:
        """All of it: positions decide."""
        return self

    def values(
        self, score: Float[Tensor, "b h t s"], seen: Visibility
    ) -> Float[Tensor, "*b h t s"]:
        """b(h, i, j); 0 distance for keys after the query, which are hidden."""
        c, mu, w_in, b_in, w_out, b_out = (
            self.learned[name] for name in ("c", "mu", "w_in", "b_in", "w_out", "b_out")
        )
        every = slice(None)
        distance = seen.distance(every, every).clamp(min=0).to(c)
        position = seen.query.to(c)[..., None]
        if distance.dim() == 4 and position.dim() == 3:
            position = position[:, None]
        whole = torch.maximum(position, (mu * self.threshold).abs())
        share = torch.log1p(c.abs() * distance) / (torch.log1p(c.abs() * whole) + _EPS)
        hidden = torch.relu(share[..., None] * w_in + b_in)
        bias = (hidden @ w_out.t() + b_out).movedim(-1, -3)
        # Where batch rows have positions of their own: (B, 1, H, T, S).
        return bias.squeeze(1) if distance.dim() == 4 else bias
