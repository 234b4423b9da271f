"""SSMax: scalable softmax, a learned multiple of ln n for each head."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from normattn.errors import InputError
from normattn.score.folded_parts import LogNPart
from normattn.score.part import When
from normattn.score.registry import register


@register
@dataclass(frozen=True)
class SSMax(LogNPart):
    """n^(s_h·z_j) / Σ n^(s_h·z) in place of softmax(z): λ · s_h·ln n, s_h learned per head.

    With `bias` λ · (s_h·ln n + b_h), as in the paper's comparison (arXiv 2501.19399). s_h starts
    where the mean of s·ln n over n = 1 … L is 1, ordinary softmax on average, and b_h at 0.
    """

    name: ClassVar[str] = "SSMax"
    summary: ClassVar[str] = "scale grows with a learned multiple of ln n, per head"
    equation: ClassVar[str] = "λ ← λ · s_h·ln n (+ b_h), s_h learned"
    source: ClassVar[str] = "arXiv 2501.19399"
    when: ClassVar[When] = "trained-in"
    bias: bool = False

    def factor(self, n: Float[Tensor, "..."], train_length: int | None) -> Float[Tensor, "..."]:
        """1: all of it is learned."""
        return torch.ones_like(n)

    def learned(self, heads: int, train_length: int | None) -> dict[str, Float[Tensor, "h"]]:
        """s = L / Σ ln n over n = 1 … L, and b = 0."""
        if train_length is None:
            raise InputError("SSMax needs the training length, by which its s starts")
        first = {"s": torch.full((heads,), train_length / math.lgamma(train_length + 1))}
        return first | {"b": torch.zeros(heads)} if self.bias else first

    def learned_factor(
        self, n: Float[Tensor, "*b one_or_h t"], learned: Mapping[str, Tensor]
    ) -> Float[Tensor, "*b h t"]:
        """s_h·ln n + b_h."""
        s = learned["s"].to(n.dtype)[:, None]
        grown = s * n.log()
        return grown + learned["b"].to(n.dtype)[:, None] if self.bias else grown
