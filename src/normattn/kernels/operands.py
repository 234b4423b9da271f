"""The queries, keys and values of some heads, laid out for products, and what stands beside them.

Query heads that share a key head are rows of one product, so keys are never repeated.

Legend: B batch, G key heads, r query heads per key head, T queries, S keys, D score size, E value
size; n = b·g of a group, c token rows of a tile, W its columns.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from normattn.kernels.problem import Problem
from normattn.kernels.tiles import Group, Plan, Span, Tile


def grouped(x: Tensor, repeat: int) -> Tensor:
    """(B, H, T, …) as (B, G, T, r, …)."""
    batch, heads = x.shape[:2]
    return x.reshape(batch, heads // repeat, repeat, *x.shape[2:]).transpose(2, 3)


def ungrouped(x: Tensor) -> Tensor:
    """(B, G, T, r, …) as (B, H, T, …)."""
    return x.transpose(2, 3).flatten(1, 2)


@dataclass(frozen=True)
class Operands:
    """One group of heads, flattened: q (n, T·r, D), k (n, S, D), v (n, S, E)."""

    plan: Plan
    group: Group
    q: Tensor
    k: Tensor
    v: Tensor
    far_q: Tensor | None
    far_k: Tensor | None

    @staticmethod
    def of(problem: Problem, plan: Plan, group: Group) -> Operands:
        """Those of a group."""
        p, at = problem, (group.batch, group.heads)

        def queries(x: Tensor) -> Tensor:
            return grouped(x, plan.repeat)[at].flatten(0, 1).flatten(1, 2)

        def keys(x: Tensor) -> Tensor:
            return x[at].flatten(0, 1)

        far_q = far_k = None
        if p.far_q is not None and p.far_k is not None and not plan.near_only:
            far_q, far_k = queries(p.far_q), keys(p.far_k)
        return Operands(plan, group, queries(p.q), keys(p.k), keys(p.v), far_q, far_k)

    def at(self, x: Tensor, tile: Tile) -> Tensor:
        """The rows of a tile in (B, G, T, r, …): (b, g, c, r, …)."""
        return x[self.group.batch, self.group.heads, tile.rows]

    def lines(self, tile: Tile) -> slice:
        """The rows of a tile in (n, T·r, …)."""
        repeat = self.plan.repeat
        return slice(tile.rows.start * repeat, tile.rows.stop * repeat)

    def apart(self, score: Tensor) -> Tensor:
        """(n, c·r, W) as (b, g, c, r, W)."""
        heads = self.group.heads.stop - self.group.heads.start
        repeat, (n, lines, width) = self.plan.repeat, score.shape
        return score.view(n // heads, heads, lines // repeat, repeat, width)

    def side(self, span: Span) -> tuple[Tensor, Tensor, str, slice]:
        """Queries and keys of a span's regime, the name of the keys, and their columns."""
        if span.far:
            assert self.far_q is not None
            assert self.far_k is not None
            return self.far_q, self.far_k, "far_k", span.columns
        start = self.plan.near_start
        return self.q, self.k, "k", slice(span.start - start, span.stop - start)

    def heads(self, x: Tensor) -> Tensor:
        """The query heads of the group in (H, …)."""
        apart = x.reshape(-1, self.plan.repeat, *x.shape[1:])
        return apart[self.group.heads].flatten(0, 1)

    def spread(self, block: Tensor) -> Tensor:
        """What is broadcastable to (b, h, c, s), to (b, g, c, r, s)."""
        if block.dim() < 4:
            block = block[(None,) * (4 - block.dim())]
        if block.shape[1] == 1:
            return block.unsqueeze(3)
        return grouped(block, self.plan.repeat)
