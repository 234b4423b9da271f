"""The norms of a layer's keys, and what they say of a key's position.

Legend: B texts, G key heads, S keys; F = `FIRST`.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from normattn.lab.diagnostics.ranks import rank_correlation

FIRST = 4
"""Keys at the start of a text that are measured apart: models like to park attention there."""

# Norms that differ by less than this share of their mean differ by rounding only.
_SAME = 1e-4
# Of a mean: finer differences between two keys are what turning them leaves of one norm.
_GRAIN = 1e-5


def key_norms(k: Float[Tensor, "b g s d"]) -> Float[Tensor, "b g s"]:
    """‖k_j‖ in float64."""
    norms: Tensor = torch.linalg.vector_norm(k.double(), dim=-1)
    return norms


def spread(norms: Float[Tensor, "*rows n"]) -> Float[Tensor, "*rows"]:
    """Standard deviation of the norms over their mean."""
    return norms.std(-1, correction=0) / norms.mean(-1)


def varied(norms: Float[Tensor, "*rows n"]) -> Tensor:
    """Whether norms differ by more than rounding: after a norm without gain they do not."""
    return spread(norms) > _SAME


def position_correlation(norms: Float[Tensor, "*rows n"]) -> Float[Tensor, "*rows"]:
    """Spearman's correlation of ‖k_j‖ with j, for j ≥ F: +1 where norms only grow.

    Norms are compared to 1e-5 of their mean: a token that comes twice has one norm in the lowest
    layer, and rounding must not rank it. NaN where norms are all equal or fewer than two are left.
    """
    rest = norms[..., FIRST:]
    rest = (rest / (rest.mean(-1, keepdim=True) * _GRAIN)).round()
    order = torch.arange(rest.shape[-1], dtype=torch.float64, device=norms.device)
    return rank_correlation(rest, order.expand(rest.shape))


def first_norms(norms: Float[Tensor, "*rows n"]) -> Float[Tensor, "*rows first"]:
    """‖k_0‖ … ‖k_(F−1)‖, each over the median norm of the keys after them."""
    return norms[..., :FIRST] / norms[..., FIRST:].quantile(0.5, -1, keepdim=True)


def signed_elsewhere(
    total: NDArray[np.float64], count: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Sums by document (documents, …), every second one with the sign of all the others together.

    What documents have in common then shows its size, whichever its sign, so that heads of opposite
    signs can be averaged; chance gives 0, and an interval over documents keeps its promise,
    whatever the values within a document have in common. A mean of |·| is above 0 by chance, and a
    sign from all documents but one is all but the document's own. The documents that gave the
    signs, and those that nothing could sign, count for nothing; nor does a single one, which has no
    interval.
    """
    measuring = np.arange(len(total)) % 2 == 1
    sign = np.sign(total[~measuring].sum(0))
    several = (count[measuring] > 0).sum(0) > 1
    kept = measuring.reshape(-1, *[1] * (total.ndim - 1)) & (sign != 0) & several
    return np.where(kept, total * sign, 0.0), np.where(kept, count, 0.0)
