"""Histograms of cosines between queries and visible keys, tile by tile, without a T × S matrix.

Legend: B batch, H query heads, T queries, P groups of queries; c query rows of a tile, W columns.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from normattn.kernels.inputs import AttentionInputs
from normattn.kernels.numerics import at_least_float32
from normattn.kernels.tile_scores import group_heads, score_groups, ungroup_heads
from normattn.kernels.tiled import TilePlan

BINS = 200
"""The number of bins of equal width over −1 … 1."""


class CosineCounts(NamedTuple):
    """For each batch row, head and group of queries: pairs per bin, and the extreme cosines."""

    counts: Int[Tensor, "b h *p bins"]
    least: Float[Tensor, "b h *p"]
    most: Float[Tensor, "b h *p"]


@torch.no_grad()
def cosine_counts(
    inputs: AttentionInputs,
    valid: Bool[Tensor, "b h t"] | None = None,
    group_of: Int[Tensor, "b h t"] | None = None,
    groups: int = 1,
) -> CosineCounts:
    """Count cos(q_i, k_j) of every visible pair of a `valid` query; far pairs use far_q and far_k.

    Bin b holds −1 + 2b/200 ≤ cos < −1 + 2(b + 1)/200; the last bin includes 1. `group_of` is the
    group 0 … `groups` − 1 of each query (default: one). Without visible pairs extremes are ±∞.
    """
    dtype, mask = at_least_float32(inputs.q.dtype), inputs.mask
    if mask.attn_mask is not None and mask.attn_mask.dtype != torch.bool:
        mask = replace(mask, attn_mask=mask.attn_mask > -torch.inf)
    # Unit vectors, and of the other inputs only the masks: no bias, cap or sink.
    q, k, far_q, far_k = (
        x if x is None else torch.nn.functional.normalize(x.detach().to(dtype), dim=-1)
        for x in (inputs.q, inputs.k, inputs.far_q, inputs.far_k)
    )
    assert q is not None
    assert k is not None
    operands = q, k, inputs.v.detach().to(dtype), mask, far_q, far_k, inputs.far_from
    unit = AttentionInputs(*operands, near_start=inputs.near_start)
    plan, rows = TilePlan.of(unit), q.shape[:2]
    valid = q.new_ones(q.shape[:3], dtype=torch.bool) if valid is None else valid
    group_of = torch.zeros_like(valid, dtype=torch.int64) if group_of is None else group_of
    counts = group_of.new_zeros(*rows, groups, BINS)
    least = q.new_full((*rows, groups), torch.inf)
    most = -least
    by_query = [group_heads(x, plan.repeat) for x in (valid, group_of)]
    for scores in score_groups(unit, plan):
        heads = scores.group.heads
        index = scores.group.batch, slice(heads.start * plan.repeat, heads.stop * plan.repeat)
        for tile in scores.group.tiles:
            if not tile.width:
                continue
            scores.weights(tile, keep=True)
            assert scores.kept_tile is not None
            cosine = ungroup_heads(scores.split_heads(scores.kept_tile[0]))
            tile_valid, group = (ungroup_heads(scores.load_grouped_rows(x, tile)) for x in by_query)
            hidden = (cosine == -torch.inf) | ~tile_valid[..., None]
            cosine = cosine.clamp(-1.0, 1.0)
            counts[index] += _histogram(cosine, hidden, group, groups)
            low, high = (cosine.masked_fill(hidden, end) for end in (torch.inf, -torch.inf))
            least[index] = least[index].scatter_reduce(2, group, low.amin(-1), "amin")
            most[index] = most[index].scatter_reduce(2, group, high.amax(-1), "amax")
    return CosineCounts(counts, least, most)


def _histogram(cosine: Tensor, hidden: Tensor, group: Tensor, groups: int) -> Tensor:
    """Counts (b, h, P, bins) of the cosines (b, h, c, W) that are not hidden."""
    batch, heads = cosine.shape[:2]
    index = ((cosine + 1.0) * (BINS / 2)).floor().long().clamp(0, BINS - 1)
    # One extra bin for hidden entries.
    size = groups * BINS + 1
    index = (index + group[..., None] * BINS).masked_fill(hidden, size - 1).flatten(2)
    row = torch.arange(batch * heads, device=cosine.device).view(batch, heads, 1)
    counts = torch.bincount((index + row * size).flatten(), minlength=row.numel() * size)
    return counts.view(batch, heads, size)[..., :-1].reshape(batch, heads, groups, BINS)
