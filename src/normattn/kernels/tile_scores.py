"""The scores and weights of one tile of attention.

A bias by distance is a Toeplitz matrix. With the last query first it is a Hankel matrix, whose
entry (u, j) depends on u + j alone. So the bias of any tile is a view of one line with positive
strides, and such tiles reverse their rows. Products are added to it, so a biased tile needs one
copy more than a plain one.

Legend: B batch, H query heads, G key heads, r query heads per key head, T queries, S keys, D score
size, E value size; n = b·g key heads of a group, c query rows of a tile, W its columns, X extra
columns: one for a sink, and a margin that the gradient of a learned bias needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from normattn.kernels.inputs import AttentionInputs
from normattn.kernels.tiled import HeadGroup, Span, Tile, TilePlan, mask_edges

Pairs = Sequence[tuple[Tensor, Tensor]]
"""Left and right factors of products."""
# With fewer rows a product is slower on a strided operand than on a copy.
_FEW_ROWS = 16


def group_heads(x: Tensor, repeat: int) -> Tensor:
    """(B, H, T, …) as (B, G, T, r, …)."""
    batch, heads = x.shape[:2]
    return x.reshape(batch, heads // repeat, repeat, *x.shape[2:]).transpose(2, 3)


def ungroup_heads(x: Tensor) -> Tensor:
    """(B, G, T, r, …) as (B, H, T, …)."""
    return x.transpose(2, 3).flatten(1, 2)


class Workspace:
    """Buffers that all tiles of a call share, since fresh memory costs as much as the arithmetic.

    `margin` is the number of extra columns of −∞ in each row.
    """

    def __init__(self, margin: int = 0) -> None:
        self.margin = margin
        self._buffers: dict[str, Tensor] = {}

    def take(self, name: str, shape: tuple[int, int, int], like: Tensor, most: int = 0) -> Tensor:
        """An uninitialised tensor in the buffer `name`, which has room for at least `most`."""
        buffer, size = self._buffers.get(name), math.prod(shape)
        if buffer is None or len(buffer) < size:
            buffer = self._buffers[name] = like.new_empty(max(most, size))
        return buffer.as_strided(shape, (shape[1] * shape[2], shape[2], 1))


class TileScores:
    """The scores and weights of one group of heads, tile by tile.

    Query heads that share a key head are rows of one product, so keys are never repeated:
    q (n, T·r, D), k (n, D, S), v (n, S, E). `kept_tile` holds the scores and weights of the last
    tile that was computed with `keep`.
    """

    def __init__(
        self, inputs: AttentionInputs, plan: TilePlan, group: HeadGroup, workspace: Workspace
    ) -> None:
        index = (group.batch, group.heads)

        def select_queries(x: Tensor) -> Tensor:
            return group_heads(x, plan.repeat)[index].flatten(0, 1).flatten(1, 2)

        self.inputs, self.plan, self.group, self.workspace = inputs, plan, group, workspace
        self.kept_tile: tuple[Tensor, Tensor] | None = None
        self.q = select_queries(inputs.q)
        self.k, self.v = inputs.k[index].flatten(0, 1).mT, inputs.v[index].flatten(0, 1)
        self.far_q = self.far_k = self.sink = self.bias = self.bias_line = None
        if inputs.far_q is not None and inputs.far_k is not None:
            self.far_q = select_queries(inputs.far_q)
            self.far_k = inputs.far_k[index].flatten(0, 1).mT
        if inputs.sink is not None:
            self.sink = inputs.sink.to(self.q.dtype).view(-1, 1, plan.repeat)[group.heads]
        self.num_extra = workspace.margin + (0 if self.sink is None else 1)
        self._widest = max((t.num_rows * (t.width + self.num_extra) for t in plan.tiles), default=0)
        if inputs.bias is not None:
            by_head = inputs.bias.view(-1, plan.repeat, inputs.bias.shape[1])
            self.bias = by_head[group.heads].flatten(0, 1).to(self.q.dtype)
        if self.bias is not None and plan.shape.aligned:
            # The bias of distances S − 1 … 0, then of future keys.
            length = plan.shape.keys + (plan.shape.rows if plan.shape.causal else plan.shape.keys)
            distance = plan.shape.keys - 1 - torch.arange(length, device=self.bias.device)
            self.bias_line = self.bias[:, distance.abs().clamp_(max=self.bias.shape[1] - 1)]

    def line_offset(self, tile: Tile, span: Span) -> int:
        """The index in the line of a tile's last query and a span's first column."""
        return int(span.start + self.plan.shape.queries - tile.rows.stop)

    def _bias_of(self, tile: Tile, span: Span) -> Tensor:
        """The bias of a span's pairs, broadcastable to (b, g, c, r, s)."""
        assert self.bias is not None
        if self.bias_line is not None:
            (heads, length), repeat = self.bias_line.shape, self.plan.repeat
            shape = 1, heads // repeat, tile.num_rows, repeat, span.width
            strides = 0, repeat * length, 1, length, 1
            values = self.bias_line.as_strided(shape, strides, self.line_offset(tile, span))
            return values if self.plan.last_row_first else values.flip(2)
        distance = self.group.mask.distance(tile.rows, span.columns).abs()
        values = self.bias[:, distance.clamp(max=self.bias.shape[1] - 1)]
        # (H, b, 1, c, s) if batch rows have different positions, else (H, c, s).
        values = values.squeeze(2).transpose(0, 1) if distance.dim() == 4 else values
        return self.to_tile_order(values)

    def before_forward(self, tile: Tile) -> None:
        """Hook of subclasses: called before the weights of a tile in the forward."""

    def after_backward(self, tile: Tile) -> None:
        """Hook of subclasses: called after the gradients of a tile in the backward."""

    def reorder_rows(self, x: Tensor) -> Tensor:
        """Convert (b, g, c, …) between query order and tile order, in either direction."""
        return x.flip(2) if self.plan.last_row_first and x.shape[2] > 1 else x

    def _reverse_rows(self, x: Tensor) -> Tensor:
        """Reverse the tokens of (n, c·r, …) if the plan reverses rows."""
        if not self.plan.last_row_first:
            return x
        return torch.unflatten(x, 1, (-1, self.plan.repeat)).flip(1).flatten(1, 2)

    def _tile_rows(self, x: Tensor, tile: Tile) -> Tensor:
        """A view of a tile's rows of (n, T·r, …), in query order."""
        repeat = self.plan.repeat
        return x.narrow(1, tile.rows.start * repeat, tile.num_rows * repeat)

    def load_rows(self, x: Tensor, tile: Tile) -> Tensor:
        """A tile's rows of (n, T·r, …), in tile order."""
        return self._reverse_rows(self._tile_rows(x, tile))

    def store_products(self, pairs: Pairs, x: Tensor, tile: Tile) -> None:
        """Write Σ a·b to a tile's rows of x (n, T·r, E)."""
        target = self._tile_rows(x, tile)
        into = torch.empty_like(target) if self.plan.last_row_first else target
        if not pairs:
            into.zero_()
        for index, (a, b) in enumerate(pairs):
            dense = a if a.shape[1] >= _FEW_ROWS else a.contiguous()
            if index:
                into.baddbmm_(dense, b)
            else:
                torch.bmm(dense, b, out=into)
        if self.plan.last_row_first:
            target.copy_(self._reverse_rows(into))

    def load_grouped_rows(self, x: Tensor, tile: Tile) -> Tensor:
        """A tile's rows of (B, G, T, r, …), in tile order: (b, g, c, r, …)."""
        return self.reorder_rows(x[self.group.batch, self.group.heads, tile.rows])

    def split_heads(self, score: Tensor) -> Tensor:
        """(n, c·r, W) as (b, g, c, r, W)."""
        heads = self.group.heads.stop - self.group.heads.start
        repeat, (n, lines, width) = self.plan.repeat, score.shape
        return score.view(n // heads, heads, lines // repeat, repeat, width)

    def to_tile_order(self, block: Tensor) -> Tensor:
        """Convert a block that broadcasts to (b, h, c, s), in query order, to (b, g, c, r, s)."""
        block = block[(None,) * (4 - block.dim())] if block.dim() < 4 else block
        repeat = 1 if block.shape[1] == 1 else self.plan.repeat
        return self.reorder_rows(group_heads(block, repeat))

    def buffer(self, name: str, tile: Tile) -> Tensor:
        """An uninitialised buffer (n, c·r, W + X)."""
        n, repeat = self.q.shape[0], self.plan.repeat
        shape = n, tile.num_rows * repeat, tile.width + self.num_extra
        return self.workspace.take(name, shape, self.q, n * repeat * self._widest)

    def operands(self, span: Span) -> tuple[Tensor, Tensor]:
        """All queries and a span's keys (n, D, s): near or far ones."""
        if span.far:
            assert self.far_q is not None
            assert self.far_k is not None
            return self.far_q, self.far_k.narrow(2, span.start, span.width)
        start = self.plan.shape.near_start
        return self.q, self.k.narrow(2, span.start - start, span.width)

    def products(self, tile: Tile, out: Tensor) -> None:
        """Write ⟨q, k⟩ of a tile to the first W columns of `out`."""
        for span, columns in tile.span_columns:
            q, k = self.operands(span)
            matmul_into(self.load_rows(q, tile), k, out[..., columns])

    def add_products(self, sums: Tensor, tile: Tile, sign: int = 1) -> None:
        """Add the products of a tile times `sign` to sums (n, c·r, W or more), in place."""
        if sums.shape[1] < _FEW_ROWS:
            products = self.buffer("products", tile)[..., : tile.width]
            self.products(tile, products)
            sums[..., : tile.width].add_(products, alpha=sign)
            return
        for span, columns in tile.span_columns:
            q, k = self.operands(span)
            sums[..., columns].baddbmm_(self.load_rows(q, tile), k, alpha=sign)

    def weights(self, tile: Tile, capped: bool = False, keep: bool = False) -> Tensor:
        """softmax of a tile's scores and extra columns, (n, c·r, W + X); 0 if no key is visible.

        `capped` stores tanh of product over cap for `grad_products`. `keep` fills `kept_tile`.
        """
        score = self.buffer("score", tile)
        few_rows = score.shape[1] < _FEW_ROWS
        biased = self.bias_line is not None and self.inputs.cap is None and not few_rows
        if biased:
            # Adding products to the bias takes one pass less than adding the bias to products.
            split = self.split_heads(score)
            for span, columns in tile.span_columns:
                split[..., columns].copy_(self._bias_of(tile, span))
            self.add_products(score, tile)
        else:
            self.products(tile, score)
        return self.softmax(score, tile, capped, keep, biased)

    def softmax(
        self, score: Tensor, tile: Tile, capped: bool, keep: bool, biased: bool = False
    ) -> Tensor:
        """Apply cap, bias, masks, sink and softmax to products, in place; see `weights`.

        With `keep` the weights get a separate buffer. `biased`: the bias is already added.
        """
        width = tile.width
        if self.inputs.cap is not None:
            tanh = score[..., :width].div_(self.inputs.cap).tanh_()
            if capped:
                self.buffer("tanh", tile)[..., :width].copy_(tanh)
            tanh.mul_(self.inputs.cap)
        if self.bias is not None and not biased:
            for span, columns in tile.span_columns:
                self.split_heads(score)[..., columns] += self._bias_of(tile, span)
        no_empty_row = self._apply_mask(self.split_heads(score), tile)
        if self.sink is not None:
            self.split_heads(score)[..., width].copy_(self.sink)
        if margin := self.workspace.margin:
            score.narrow(2, score.shape[-1] - margin, margin).fill_(-torch.inf)
        if score.shape[-1] == 0:
            self.kept_tile = score, score
            return score
        empty = None if no_empty_row else (score == -torch.inf).all(-1, keepdim=True)
        weight = torch.softmax(score, -1, out=self.buffer("weight", tile) if keep else score)
        if empty is not None:
            weight.masked_fill_(empty, 0.0)
        if keep:
            self.kept_tile = score, weight
        return weight

    def _apply_mask(self, split_score: Tensor, tile: Tile) -> bool:
        """Set hidden scores to −∞; return whether every row is certain to see a key."""
        shape, mask = self.plan.shape, self.group.mask
        if shape.aligned:
            mask_edges(split_score, tile, self.plan)
            if mask.only_causal_or_window:
                return True
            # The edges cover causality and the sliding window.
            mask = replace(mask, causal=False, window=None)
        for span, columns in tile.span_columns:
            score, block = split_score[..., columns], (tile.rows, span.columns)
            added, hidden = mask.additive(*block), mask.hidden(*block)
            if added is not None:
                score += self.to_tile_order(added)
            if shape.far_from is not None and not shape.aligned:
                far = mask.distance(*block) >= shape.far_from
                other_regime = ~far if span.far else far
                hidden = other_regime if hidden is None else hidden | other_regime
            if hidden is not None:
                score.masked_fill_(self.to_tile_order(hidden), -torch.inf)
        return False

    def log_sum_exp(self) -> Tensor:
        """ln Σ exp of each row of the kept tile, (b, g, c, r), in query order."""
        assert self.kept_tile is not None
        score, weight = self.kept_tile
        if not score.shape[-1]:
            return self.split_heads(score).new_full(self.split_heads(score).shape[:-1], -torch.inf)
        top = score.amax(-1, keepdim=True)
        # The largest weight is exp(0) divided by the sum.
        lse = top - weight.amax(-1, keepdim=True).log()
        lse = lse.masked_fill_(top == -torch.inf, -torch.inf)
        return self.reorder_rows(self.split_heads(lse).squeeze(-1))

    def multiply_values(self, weight: Tensor, tile: Tile, out: Tensor) -> None:
        """Write Σ_j weight · v to the tile's rows of `out` (n, T·r, E)."""
        spans, v = tile.spans, self.v
        if weight.shape[1] < _FEW_ROWS and all(a.stop == b.start for a, b in pairwise(spans)):
            # Spans that follow each other, as in a decoding step, are one product.
            columns = slice(spans[0].start, spans[-1].stop) if spans else slice(0)
            self.store_products([(weight[..., : tile.width], v[:, columns])], out, tile)
            return
        pairs = [(weight[..., x], v.narrow(1, s.start, s.width)) for s, x in tile.span_columns]
        self.store_products(pairs, out, tile)

    def grad_weights(self, grad_out: Tensor, tile: Tile) -> Tensor:
        """⟨grad_out, v⟩, (n, c·r, W + X); 0 for the extra columns, whose values are 0."""
        result = self.buffer("gradient", tile)
        if self.num_extra:
            result.narrow(2, tile.width, self.num_extra).zero_()
        for span, columns in tile.span_columns:
            values = self.v.narrow(1, span.start, span.width)
            matmul_into(grad_out, values.mT, result[..., columns])
        return result

    def grad_products(self, grad_score: Tensor, tile: Tile) -> Tensor:
        """The gradient of the products from `grad_score`, which may be overwritten."""
        if self.inputs.cap is not None:
            tanh = self.buffer("tanh", tile)[..., : tile.width]
            grad_score[..., : tile.width].mul_(tanh.square_().neg_().add_(1))
        return grad_score


MakeScores = Callable[[AttentionInputs, TilePlan, HeadGroup, Workspace], TileScores]
"""A constructor of the scores of a group of heads: `TileScores`, or the residual ones."""


def score_groups(
    inputs: AttentionInputs, plan: TilePlan, make: MakeScores = TileScores, margin: int = 0
) -> Iterator[TileScores]:
    """The scores of every group of heads, with shared buffers; `inputs` are float32 or wider."""
    workspace = Workspace(margin)
    for group in plan.groups(inputs.q):
        yield make(inputs, plan, group, workspace)


def matmul_into(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Write a·b to `out`; few rows are multiplied densely and copied, as strides slow them down."""
    if a.shape[1] >= _FEW_ROWS:
        torch.bmm(a, b, out=out)
    else:
        out.copy_(torch.bmm(a, b))
