"""Cosines of queries with the keys that they see, counted tile by tile: never a matrix.

Legend: B batch, H query heads, T queries, P groups of queries.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from normattn.kernels.inputs import AttentionInputs
from normattn.kernels.tile_scores import TileScores, Workspace, grouped
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
    plan = Plan.of(bare)
    batch, heads = inputs.q.shape[:2]
    device, dtype = inputs.q.device, bare.q.dtype
    counts = torch.zeros(batch, heads, groups, BINS, dtype=torch.int64, device=device)
    least = torch.full((batch, heads, groups), torch.inf, dtype=dtype, device=device)
    most = -least
    space = Workspace()
    for group in plan.groups(bare.q):
        scores = TileScores(bare, plan, group, space)
        at = group.batch, slice(group.heads.start * plan.repeat, group.heads.stop * plan.repeat)
        for tile in group.tiles:
            if not tile.width:
                continue
            scores.weights(tile, kept=True)
            assert scores.pair is not None
            # (b, g, c, r, W) as (b, h, c, W).
            cosine = scores.apart(scores.pair[0]).transpose(2, 3).flatten(1, 2)
            hidden = cosine == -torch.inf
            if valid is not None:
                own = scores.rows_of(grouped(valid, plan.repeat), tile)
                hidden = hidden | ~own.transpose(2, 3).flatten(1, 2)[..., None]
            number = torch.zeros_like(hidden[..., 0], dtype=torch.int64)
            if group_of is not None:
                row_group = scores.rows_of(grouped(group_of, plan.repeat), tile)
                number = row_group.transpose(2, 3).flatten(1, 2)
            cosine = cosine.clamp(-1.0, 1.0)
            counts[at] += _histogram(cosine, hidden, number, groups)
            low, high = (cosine.masked_fill(hidden, end) for end in (torch.inf, -torch.inf))
            least[at] = least[at].scatter_reduce(2, number, low.amin(-1), "amin")
            most[at] = most[at].scatter_reduce(2, number, high.amax(-1), "amax")
    return CosineCounts(counts, least, most)


def _directions(inputs: AttentionInputs) -> AttentionInputs:
    """The same pairs of vectors of length 1, and nothing but their product."""

    def one(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        wide = x.detach() if x.dtype == torch.float64 else x.detach().float()
        return torch.nn.functional.normalize(wide, dim=-1)

    q, k, v = one(inputs.q), one(inputs.k), inputs.v.detach()
    assert q is not None
    assert k is not None
    far_q, far_k = one(inputs.far_q), one(inputs.far_k)
    seen = inputs.visibility
    if seen.mask is not None and seen.mask.dtype != torch.bool:
        seen = replace(seen, mask=seen.mask > -torch.inf)
    return AttentionInputs(
        *(q, k, v.to(q), seen, far_q, far_k, inputs.window), near_start=inputs.near_start
    )


def _histogram(cosine: Tensor, hidden: Tensor, number: Tensor, groups: int) -> Tensor:
    """Counts (b, h, P, bins) of the entries (b, h, c, W) that are not hidden."""
    batch, heads = cosine.shape[:2]
    index = ((cosine + 1.0) * (BINS / 2)).floor().long().clamp(0, BINS - 1)
    room = groups * BINS + 1
    # One place more, for what is hidden.
    index = (index + number[..., None] * BINS).masked_fill(hidden, room - 1).flatten(2)
    row = torch.arange(batch * heads, device=cosine.device).view(batch, heads, 1)
    counts = torch.bincount((index + row * room).flatten(), minlength=row.numel() * room)
    return counts.view(batch, heads, room)[..., :-1].reshape(batch, heads, groups, BINS)
