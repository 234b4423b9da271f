"""Differential attention of layers that call their attention twice, and join what it gave.

A layer calls its attention with the same queries and keys twice, each time with half of the values,
takes λ times the output of the last half of its heads from that of the first, and norms the rest.

Legend: B batch, H query heads, G key heads, T tokens, D head dimension, E value size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from normattn.hf.score_fitting import CLOSE
from normattn.hf.score_recording import Heard
from normattn.score import Score


@dataclass(frozen=True)
class Pairs:
    """λ and what else `Differential` needs, the layer's values, and what it made of its pairs."""

    share: float
    init: float
    eps: float
    v: Float[Tensor, "b g t e"]
    out: Float[Tensor, "b t h e"]

    @property
    def part(self) -> str:
        """The part that says so."""
        return f"Differential(init={self.init:.6g},eps={self.eps!r})"

    def fill(self, score: Score) -> None:
        """Set what the score learns so that its λ is this one."""
        assert score.difference is not None
        beyond = self.share - self.init
        for name, vector in score.difference.items():
            vector.fill_(1.0 if name == "gain" else 0.0)
        side = "1" if beyond >= 0 else "2"
        score.difference[f"q{side}"][0] = 1.0
        score.difference[f"k{side}"][0] = math.log1p(abs(beyond))


def beside_partners(x: Float[Tensor, "b h t d"], groups: int) -> Float[Tensor, "b h t d"]:
    """Heads of x, those of key heads g and g + G/2 next to each other, as `Differential` has."""
    blocks = x.reshape(x.shape[0], 2, groups // 2, -1, *x.shape[2:])
    return blocks.transpose(1, 2).reshape(x.shape)


def pairs_of(heard: Heard, made: Sequence[Tensor], eps: Sequence[float]) -> Pairs | None:
    """How one of `made` (B, T, W) comes of the outputs of two calls; None where it does not."""
    twin, groups = heard.twin, heard.k.shape[1]
    if twin is None or groups % 2 or twin.out.shape != heard.out.shape:
        return None
    first, second = torch.cat((heard.out, twin.out), -1).double().chunk(2, 2)
    for wanted in (candidate.double().reshape(first.shape) for candidate in made):
        share = _share(first, second, wanted)
        rest = first - share * second
        for epsilon in eps:
            normed = rest / (rest.square().mean(-1, keepdim=True) + epsilon).sqrt()
            size = float((normed * wanted).sum() / normed.square().sum())
            close = float((size * normed - wanted).abs().max()) <= CLOSE * float(wanted.abs().max())
            if close and 0 < size <= 1:
                v = torch.cat((heard.v[:, : groups // 2], twin.v[:, : groups // 2]), 1)
                out = _as_heads(wanted, groups)
                return Pairs(share, 1 - size, epsilon, beside_partners(v, groups), out)
    return None


def _share(first: Tensor, second: Tensor, wanted: Tensor) -> float:
    """The λ for which first − λ·second is `wanted` but for a number of each row."""

    def across(x: Tensor) -> Tensor:
        return x * wanted.roll(1, -1) - x.roll(1, -1) * wanted

    return float((across(first) * across(second)).sum() / across(second).square().sum())


def _as_heads(pairs: Float[Tensor, "b t p e2"], groups: int) -> Float[Tensor, "b t h e"]:
    """The two halves of each pair as heads, where `Differential` has them."""
    batch, tokens, _, size = pairs.shape
    split = pairs.reshape(batch, tokens, groups // 2, -1, 2, size // 2)
    return split.transpose(3, 4).reshape(batch, tokens, -1, size // 2)
