"""Gradients under construction, group of heads by group of heads.

Those of keys and values gather over tiles in wide type and transposed, (n, D, S): the products
gradᵀ · weights read the weights row by row. Where one tile holds all columns nothing gathers, and
weightsᵀ · grad is written in its place at once, 1.6 to 9 times faster than by way of sums.

Legend: B batch, H query heads, G key heads, r query heads per key head, T queries, S keys, D score
size, E value size, R distances; n = b·g of a group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from normattn.kernels.operands import ungrouped
from normattn.kernels.problem import Problem
from normattn.kernels.products import times
from normattn.kernels.scores import Scores
from normattn.kernels.tiles import Plan, Tile


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type in which sums over tiles gather."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass
class Gradients:
    """Of q and far_q as (B, G, T, r, D); of k, v, far_k like them; of bias and sink wide."""

    q: Tensor
    k: Tensor
    v: Tensor
    far_q: Tensor | None
    far_k: Tensor | None
    bias: Tensor | None
    sink: Tensor | None

    @staticmethod
    def like(problem: Problem, plan: Plan) -> Gradients:
        """Room for all of them, whatever the layout of the operands."""
        p = problem

        def queries() -> Tensor:
            b, h, t, d = p.q.shape
            return p.q.new_empty(b, h // plan.repeat, t, plan.repeat, d)

        def same(x: Tensor) -> Tensor:
            return x.new_empty(x.shape)

        def sums(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.new_zeros(x.shape, dtype=wide(p.q.dtype))

        far = p.far_k if not plan.near_only else None
        return Gradients(
            queries(),
            same(p.k),
            same(p.v),
            None if far is None else queries(),
            None if far is None else same(far),
            sums(p.bias),
            sums(p.sink),
        )

    def all(self, problem: Problem) -> tuple[Tensor | None, ...]:
        """In the order of `Problem.tensors`, in their shapes and types."""
        bias = None if problem.bias is None or self.bias is None else self.bias.to(problem.bias)
        sink = None if problem.sink is None or self.sink is None else self.sink.to(problem.sink)
        far_q = None if self.far_q is None else ungrouped(self.far_q)
        return ungrouped(self.q), self.k, self.v, far_q, self.far_k, bias, sink


class _Columns:
    """The gradient of some heads' keys or values, `into` (n, S, D), column by column."""

    def __init__(self, into: Tensor, at_once: bool) -> None:
        """Zero sums over tiles; none where the only product is written `at_once`."""
        self.into = into
        n, s, d = into.shape
        self.sums = None if at_once else into.new_zeros(n, d, s, dtype=wide(into.dtype))

    def add(self, rows: Tensor, weight: Tensor, columns: slice) -> None:
        """Add weightᵀ (n, s, c) · rows (n, c, D) to `columns`."""
        if self.sums is None:
            torch.bmm(weight.transpose(1, 2), rows, out=self.into)
            return
        sums = self.sums[..., columns]
        if sums.dtype == rows.dtype:
            sums.baddbmm_(rows.transpose(1, 2), weight)
        else:
            sums += rows.transpose(1, 2) @ weight

    def close(self) -> None:
        """Write the sums in the type of the operands."""
        if self.sums is not None:
            self.into.copy_(self.sums.transpose(1, 2))


class GroupGradients:
    """The sums of one group; `close` writes them where they belong."""

    def __init__(self, whole: Gradients, scores: Scores) -> None:
        """Nothing is added yet."""
        self.whole, self.scores, self.operands = whole, scores, scores.operands
        group = self.operands.group
        self.where = (group.batch, group.heads)
        alone = scores.extra is None and self.operands.plan.alone
        self.k, self.v = self._columns(whole.k, alone), self._columns(whole.v, alone)
        self.far_k = None if whole.far_k is None else self._columns(whole.far_k, False)

    def _columns(self, into: Tensor, at_once: bool) -> _Columns:
        return _Columns(into[self.where].flatten(0, 1), at_once)

    def add_values(self, by_out: Tensor, weight: Tensor, tile: Tile) -> None:
        """Weightᵀ · by_out to the values."""
        for span, where in tile.laid():
            self.v.add(by_out, weight[..., where], span.columns)

    def add_scores(self, by_score: Tensor, tile: Tile) -> None:
        """Send a tile's gradient of the scores to bias, sink, queries and keys."""
        sink, operands = self.whole.sink, self.operands
        if sink is not None and self.scores.extra is not None:
            by_sink = operands.apart(by_score)[..., tile.width].sum((0, 2), dtype=sink.dtype)
            sink.view(-1, operands.plan.repeat)[operands.group.heads] += by_sink
        if self.whole.bias is not None:
            self._add_bias(by_score, tile)
        by_product = self.scores.by_product(by_score, tile)
        self._add_side(by_product, tile, False, self.whole.q, self.k)
        if self.whole.far_q is not None and self.far_k is not None:
            self._add_side(by_product, tile, True, self.whole.far_q, self.far_k)

    def _add_side(
        self, by_product: Tensor, tile: Tile, far: bool, into: Tensor, sums: _Columns
    ) -> None:
        """To the queries and keys of one regime."""
        lines, pairs = self.operands.lines(tile), []
        for span, where in tile.laid():
            if span.far != far:
                continue
            q, k, _, columns = self.operands.side(span)
            pairs.append((by_product[..., where], k[:, columns]))
            sums.add(q[:, lines], by_product[..., where], columns)
        target = into[self.where].flatten(0, 1).flatten(1, 2)
        times(pairs, target[:, lines])

    def _add_bias(self, by_score: Tensor, tile: Tile) -> None:
        """Scatter to each head's distances."""
        operands, bias = self.operands, self.whole.bias
        assert bias is not None
        apart, repeat = operands.apart(by_score), operands.plan.repeat
        heads = slice(*(repeat * x for x in (self.where[1].start, self.where[1].stop)))
        for span, where in tile.laid():
            distance = operands.group.seen.distance(tile.rows, span.columns).abs()
            block = ungrouped(apart[..., where]).to(bias.dtype)
            if distance.dim() == 2:
                bias[heads].index_add_(1, distance.flatten(), block.sum(0).flatten(1))
                continue
            index = distance[:, 0].expand(block.shape[0], *block.shape[2:])
            bias[heads].index_add_(1, index.flatten(), block.transpose(0, 1).flatten(1))

    def close(self) -> None:
        """Write what has gathered over tiles."""
        for columns in (self.k, self.v, self.far_k):
            if columns is not None:
                columns.close()
