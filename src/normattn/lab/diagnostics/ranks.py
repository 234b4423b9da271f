"""Rank correlation, with shared ranks for equal values."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def rank_correlation(a: Float[Tensor, "*rows n"], b: Float[Tensor, "*rows n"]) -> Tensor:
    """Spearman's correlation along the last axis, in float64: Pearson's of the ranks.

    Equal values share the mean of their ranks; where one side is all equal, the result is NaN.
    """
    x, y = _ranks(a), _ranks(b)
    x, y = x - x.mean(-1, keepdim=True), y - y.mean(-1, keepdim=True)
    scale = (x.square().sum(-1) * y.square().sum(-1)).sqrt()
    return torch.where(scale > 0, (x * y).sum(-1) / scale, torch.nan)


def _ranks(values: Tensor) -> Tensor:
    """Ranks from 0 in float64, ties at their mean."""
    ordered = values.double().sort(-1).values.contiguous()
    values = values.double().contiguous()
    below = torch.searchsorted(ordered, values, right=False)
    upto = torch.searchsorted(ordered, values, right=True)
    return (below + upto - 1).double() / 2
