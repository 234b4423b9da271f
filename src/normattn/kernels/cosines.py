"""Cosines of queries with the keys that they see, counted tile by tile: never a matrix.

Legend: B batch, H query heads, T queries.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from normattn.kernels.problem import Problem
from normattn.kernels.rows import Rows, grouped
from normattn.kernels.tiles import Plan

BINS = 200
"""Bins of equal width over −1 … 1."""


@dataclass(frozen=True)
class CosineCounts:
    """Per text and head: how many pairs fall into each bin, and the extremes themselves."""

    counts: Int[Tensor, "b h bins"]
    least: Float[Tensor, "b h"]
    most: Float[Tensor, "b h"]


@torch.no_grad()
def cosine_counts(problem: Problem, valid: Bool[Tensor, "b h t"] | None = None) -> CosineCounts:
    """cos(q_i, k_j) of every visible pair, far ones by the far queries and keys.

    Bin b holds −1 + 2b/200 ≤ cos < −1 + 2(b + 1)/200, the last one 1 too; of the queries only those
    that are `valid`. Where no pair is visible the extremes are ±∞.
    """
    bare = _directions(problem)
    plan = Plan.of(bare)
    batch, heads = problem.q.shape[:2]
    device, dtype = problem.q.device, bare.q.dtype
    counts = torch.zeros(batch, heads, BINS, dtype=torch.int64, device=device)
    least = torch.full((batch, heads), torch.inf, dtype=dtype, device=device)
    most = -least
    for group in plan.groups(bare.q):
        rows = Rows.of(bare, plan, group)
        at = group.batch, slice(group.heads.start * plan.repeat, group.heads.stop * plan.repeat)
        for tile in plan.tiles:
            if not tile.width:
                continue
            rows.weights(tile, kept=True)
            assert rows.pair is not None
            # (b, g, c, r, W) as (b, h, c, W).
            cosine = rows.apart(rows.pair[0]).transpose(2, 3).flatten(1, 2)
            hidden = cosine == -torch.inf
            if valid is not None:
                own = rows.at(grouped(valid, plan.repeat), tile)
                hidden = hidden | ~own.transpose(2, 3).flatten(1, 2)[..., None]
            cosine = cosine.clamp(-1.0, 1.0)
            counts[at] += _histogram(cosine, hidden)
            least[at] = least[at].minimum(cosine.masked_fill(hidden, torch.inf).amin((-2, -1)))
            most[at] = most[at].maximum(cosine.masked_fill(hidden, -torch.inf).amax((-2, -1)))
    return CosineCounts(counts, least, most)


def _directions(problem: Problem) -> Problem:
    """The same pairs of vectors of length 1, and nothing but their product."""

    def one(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        wide = x.detach() if x.dtype == torch.float64 else x.detach().float()
        return torch.nn.functional.normalize(wide, dim=-1)

    q, k, v = one(problem.q), one(problem.k), problem.v.detach()
    assert q is not None
    assert k is not None
    far_q, far_k = one(problem.far_q), one(problem.far_k)
    seen = problem.visibility
    if seen.mask is not None and seen.mask.dtype != torch.bool:
        seen = replace(seen, mask=seen.mask > -torch.inf)
    return Problem(
        *(q, k, v.to(q), seen, far_q, far_k, problem.window), near_start=problem.near_start
    )


def _histogram(cosine: Tensor, hidden: Tensor) -> Tensor:
    """Counts (b, h, bins) of the entries that are not hidden."""
    batch, heads = cosine.shape[:2]
    place = ((cosine + 1.0) * (BINS / 2)).floor().long().clamp(0, BINS - 1)
    # One bin more, for what is hidden.
    place = place.masked_fill(hidden, BINS).flatten(2)
    row = torch.arange(batch * heads, device=cosine.device).view(batch, heads, 1)
    found = torch.bincount((place + row * (BINS + 1)).flatten(), minlength=row.numel() * (BINS + 1))
    return found.view(batch, heads, BINS + 1)[..., :BINS]
