"""From products to weights: cap, bias, masks and further logits, then softmax, tile by tile.

Legend: B batch, H query heads, G key heads, r query heads per key head, T queries; n = b·g of a
group, c token rows of a tile, W its columns, X further logits.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from normattn.kernels.operands import Operands
from normattn.kernels.problem import Problem
from normattn.kernels.products import Products
from normattn.kernels.tiles import Group, Plan, Span, Tile, hide_edges
from normattn.kernels.visibility import Visibility


class Scores:
    """The scores of one group of heads and their weights.

    `extra` (B, G, T, r, X) are further logits of each row, by default the sink. `pair` holds the
    scores and weights of the last tile whose scores were to be `kept`.
    """

    def __init__(
        self, problem: Problem, plan: Plan, group: Group, extra: Tensor | None = None
    ) -> None:
        """Nothing is computed yet."""
        if extra is None and problem.sink is not None:
            sink = problem.sink.to(problem.q.dtype).view(1, -1, 1, plan.repeat, 1)
            extra = sink.expand(problem.q.shape[0], -1, plan.queries, -1, -1)
        self.problem, self.extra = problem, extra
        self.operands = Operands.of(problem, plan, group)
        self.products = Products(self.operands, 0 if extra is None else extra.shape[-1])
        self.pair: tuple[Tensor, Tensor] | None = None

    def enter(self, tile: Tile) -> None:
        """Called before the weights of a tile in a forward."""

    def leave(self, tile: Tile) -> None:
        """Called after the gradients of a tile in a backward."""

    def weights(self, tile: Tile, capped: bool = False, kept: bool = False) -> Tensor:
        """softmax of the tile's scores and further logits, (n, c·r, W + X).

        0 for a query that sees no key. `capped` keeps tanh of the product over the cap for
        `by_product`; `kept` the scores beside their weights, as `pair`.
        """
        score = self.products.room("score", tile)
        self.products.scores(tile, score)
        return self.softmax(score, tile, capped, kept)

    def by_product(self, by_score: Tensor, tile: Tile) -> Tensor:
        """The gradient of the products from that of the scores, which may be overwritten."""
        if self.problem.cap is not None:
            tanh = self.products.room("tanh", tile)[..., : tile.width]
            by_score[..., : tile.width].mul_(tanh.square_().neg_().add_(1))
        return by_score

    def softmax(self, score: Tensor, tile: Tile, capped: bool, kept: bool) -> Tensor:
        """Everything that comes after the products, in place; as for `weights`.

        With `kept` the weights have a place of their own.
        """
        apart = self.operands.apart(score)
        if self.problem.cap is not None:
            seen = score[..., : tile.width].div_(self.problem.cap).tanh_()
            if capped:
                self.products.room("tanh", tile, score.dtype)[..., : tile.width].copy_(seen)
            seen.mul_(self.problem.cap)
        self._add_bias(apart, tile)
        certain = self._hide(apart, tile)
        if self.extra is not None:
            apart[..., tile.width :].copy_(self.operands.at(self.extra, tile))
        if score.shape[-1] == 0:
            return score
        nothing = None if certain else (score == -torch.inf).all(-1, keepdim=True)
        into = self.products.room("weight", tile, score.dtype) if kept else score
        weight = torch.softmax(score, -1, out=into)
        if nothing is not None:
            weight.masked_fill_(nothing, 0.0)
        if kept:
            self.pair = score, weight
        return weight

    def _add_bias(self, apart: Tensor, tile: Tile) -> None:
        if self.problem.bias is None:
            return
        bias = self.operands.heads(self.problem.bias).to(apart.dtype)
        for span, where in tile.laid():
            distance = self.operands.group.seen.distance(tile.rows, span.columns).abs()
            values = bias[:, distance]
            # (H, b, 1, c, s) where every batch row has its own positions, else (H, c, s).
            values = values.squeeze(2).transpose(0, 1) if distance.dim() == 4 else values
            apart[..., where] += self.operands.spread(values)

    def _hide(self, apart: Tensor, tile: Tile) -> bool:
        """−∞ where no key is seen; whether every row is certain to see one."""
        plan, seen = self.operands.plan, self.operands.group.seen
        if plan.aligned:
            hide_edges(apart, tile, plan.keys - plan.queries)
            if seen.regular:
                return True
            # Causality and the sliding window are in the edges already.
            seen = replace(seen, causal=False, window=None)
        for span, where in tile.laid():
            score = apart[..., where]
            added = seen.added(tile.rows, span.columns)
            if added is not None:
                score += self.operands.spread(added)
            hidden = _hidden(plan, seen, tile, span)
            if hidden is not None:
                score.masked_fill_(self.operands.spread(hidden), -torch.inf)
        return False


def _hidden(plan: Plan, seen: Visibility, tile: Tile, span: Span) -> Tensor | None:
    """What no row may see in a span, and pairs of the other regime."""
    hidden = seen.hidden(tile.rows, span.columns)
    if plan.aligned or plan.window is None:
        return hidden
    far = seen.distance(tile.rows, span.columns) >= plan.window
    other = ~far if span.far else far
    return other if hidden is None else hidden | other
