"""Cosines of queries with the keys that they see, counted tile by tile: never a matrix.

Legend: B batch, H query heads, T queries, P groups of queries; c token rows of a tile, W columns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from normattn.kernels.inputs import AttentionInputs
from normattn.kernels.numerics import at_least_float32
from normattn.kernels.tile_scores import grouped, score_groups
from normattn.kernels.tiled import Plan

BINS = 200
"""Bins of equal width over −1 … 1."""


@dataclass(frozen=True)
class CosineCounts:
    """Per text, head and group of queries: pairs in each bin, and the extremes themselves."""

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
    """cos(q_i, k_j) of every visible pair, far ones by the far queries and keys.

    Bin b holds −1 + 2b/200 ≤ cos < −1 + 2(b + 1)/200, the last one 1 too; of the queries only those
    that are `valid`. `group_of` says to which of P = `groups` each query belongs; without it all
    are one. Where no pair is visible the extremes are ±∞.
    """
    bare = _directions(inputs)
    plan, rows = Plan.of(bare), inputs.q.shape[:3]
    valid = inputs.q.new_ones(rows, dtype=torch.bool) if valid is None else valid
    group_of = torch.zeros_like(valid, dtype=torch.int64) if group_of is None else group_of
    counts = group_of.new_zeros(*rows[:2], groups, BINS)
    least = bare.q.new_full((*rows[:2], groups), torch.inf)
    most = -least
    for scores in score_groups(bare, plan):
        heads = scores.group.heads
        at = scores.group.batch, slice(heads.start * plan.repeat, heads.stop * plan.repeat)
        for tile in scores.group.tiles:
            if not tile.width:
                continue
            scores.weights(tile, keep=True)
            assert scores.kept is not None
            # (b, g, c, r, …) as (b, h, c, …).
            cosine = scores.by_head(scores.kept[0]).transpose(2, 3).flatten(1, 2)
            own, number = (
                scores.rows_of(grouped(x, plan.repeat), tile).transpose(2, 3).flatten(1, 2)
                for x in (valid, group_of)
            )
            hidden = (cosine == -torch.inf) | ~own[..., None]
            cosine = cosine.clamp(-1.0, 1.0)
            counts[at] += _histogram(cosine, hidden, number, groups)
            low, high = (cosine.masked_fill(hidden, end) for end in (torch.inf, -torch.inf))
            least[at] = least[at].scatter_reduce(2, number, low.amin(-1), "amin")
            most[at] = most[at].scatter_reduce(2, number, high.amax(-1), "amax")
    return CosineCounts(counts, least, most)


def _directions(inputs: AttentionInputs) -> AttentionInputs:
    """The same pairs of vectors of length 1, and nothing but their product."""
    wide = at_least_float32(inputs.q.dtype)
    q, k, far_q, far_k = (
        None if x is None else torch.nn.functional.normalize(x.detach().to(wide), dim=-1)
        for x in (inputs.q, inputs.k, inputs.far_q, inputs.far_k)
    )
    assert q is not None
    assert k is not None
    mask = inputs.mask
    if mask.attn_mask is not None and mask.attn_mask.dtype != torch.bool:
        mask = replace(mask, attn_mask=mask.attn_mask > -torch.inf)
    return AttentionInputs(
        *(q, k, inputs.v.detach().to(wide), mask, far_q, far_k, inputs.window),
        near_start=inputs.near_start,
    )


def _histogram(cosine: Tensor, hidden: Tensor, number: Tensor, groups: int) -> Tensor:
    """Counts (b, h, P, bins) of the entries (b, h, c, W) that are not hidden."""
    batch, heads = cosine.shape[:2]
    index = ((cosine + 1.0) * (BINS / 2)).floor().long().clamp(0, BINS - 1)
    # One place more, for what is hidden.
    room = groups * BINS + 1
    index = (index + number[..., None] * BINS).masked_fill(hidden, room - 1).flatten(2)
    row = torch.arange(batch * heads, device=cosine.device).view(batch, heads, 1)
    counts = torch.bincount((index + row * room).flatten(), minlength=row.numel() * room)
    return counts.view(batch, heads, room)[..., :-1].reshape(batch, heads, groups, BINS)
