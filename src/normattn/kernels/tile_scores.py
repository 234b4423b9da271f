"""The scores and weights of one tile of attention.

A bias by distance is a Toeplitz matrix. With the last query first it is a Hankel matrix: entry
(u, j) depends on u + j alone, so that the bias of any tile is a view of one line, both strides
positive; such tiles run backwards. Products are added to it, and causality stands in the line as
−∞: a biased tile takes no pass more than a plain one.

Legend: B batch, H query heads, G key heads, r query heads per key head, T queries, S keys, D score
size, E value size; n = b·g key heads of a group, c token rows of a tile, W its columns, X further
logits: one of a sink, and a margin that the gradient of a learned bias needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from normattn.kernels.inputs import AttentionInputs
from normattn.kernels.numerics import finite
from normattn.kernels.tiled import Group, Plan, Span, Tile, hide_edges

Pairs = Iterable[tuple[Tensor, Tensor]]
"""Left and right operands of products."""
# Rows of a product below which a strided operand costs more than a copy of it.
_FEW = 16


def grouped(x: Tensor, repeat: int) -> Tensor:
    """(B, H, T, …) as (B, G, T, r, …)."""
    batch, heads = x.shape[:2]
    return x.reshape(batch, heads // repeat, repeat, *x.shape[2:]).transpose(2, 3)


def ungrouped(x: Tensor) -> Tensor:
    """(B, G, T, r, …) as (B, H, T, …)."""
    return x.transpose(2, 3).flatten(1, 2)


class Workspace:
    """The buffers that all tiles of a call share; every row has a `margin` of logits of −∞.

    Fresh pages cost as much as the arithmetic.
    """

    def __init__(self, margin: int = 0) -> None:
        """Nothing is allocated yet."""
        self.margin = margin
        self._buffers: dict[str, Tensor] = {}

    def take(self, name: str, shape: tuple[int, int, int], like: Tensor, most: int = 0) -> Tensor:
        """Uninitialised numbers in a buffer that has room for `most`."""
        buffer, size = self._buffers.get(name), math.prod(shape)
        if buffer is None or len(buffer) < size:
            buffer = self._buffers[name] = like.new_empty(max(most, size))
        return buffer.as_strided(shape, (shape[1] * shape[2], shape[2], 1))


class TileScores:
    """The scores and weights of one group of heads, tile by tile.

    Query heads that share a key head are rows of one product, so keys are never repeated:
    q (n, T·r, D), k (n, D, S), v (n, S, E). `kept` holds the scores and weights of the last tile
    whose scores were to be kept.
    """

    def __init__(self, inputs: AttentionInputs, plan: Plan, group: Group, space: Workspace) -> None:
        """Nothing is computed yet."""
        at = (group.batch, group.heads)

        def queries(x: Tensor) -> Tensor:
            return grouped(x, plan.repeat)[at].flatten(0, 1).flatten(1, 2)

        self.inputs, self.plan, self.group, self.space = inputs, plan, group, space
        self.kept: tuple[Tensor, Tensor] | None = None
        self.q = queries(inputs.q)
        self.k, self.v = inputs.k[at].flatten(0, 1).mT, inputs.v[at].flatten(0, 1)
        self.far_q = self.far_k = self.sink = self.bias = self.line = None
        if inputs.far_q is not None and inputs.far_k is not None:
            self.far_q, self.far_k = queries(inputs.far_q), inputs.far_k[at].flatten(0, 1).mT
        if inputs.sink is not None:
            self.sink = inputs.sink.to(self.q.dtype).view(-1, 1, plan.repeat)[group.heads]
        self.extra = space.margin + (0 if self.sink is None else 1)
        self._widest = max((t.count * (t.width + self.extra) for t in plan.tiles), default=0)
        if inputs.bias is not None:
            by_head = inputs.bias.view(-1, plan.repeat, inputs.bias.shape[1])
            self.bias = by_head[group.heads].flatten(0, 1).to(self.q.dtype)
            self.line = self._line(self.bias) if plan.shape.aligned else None
        # The line hides later keys too, but NaN plus −∞ is NaN.
        self._hides_future = self.line is None or not group.mask.causal or not self.finite
        self._all_hidden = (
            not self._hides_future and group.mask.only_causal and plan.shape.window is None
        )

    @cached_property
    def finite(self) -> bool:
        """Whether every key is known to be."""
        return self.inputs.finite or finite(self.k)

    def _line(self, bias: Tensor) -> Tensor:
        """b of the distances S − 1 … 0, then of later keys, −∞ where causality hides them."""
        shape = self.plan.shape
        length = shape.keys + (shape.rows if shape.causal else shape.keys)
        distance = shape.keys - 1 - torch.arange(length, device=bias.device)
        line = bias[:, distance.abs().clamp_(max=bias.shape[1] - 1)]
        return line.masked_fill_(distance < 0, -torch.inf) if shape.causal else line

    def line_offset(self, tile: Tile, span: Span) -> int:
        """Where the line holds the bias of a tile's last position and a span's first column."""
        return int(span.start + self.plan.shape.queries - tile.rows.stop)

    def _bias_of(self, tile: Tile, span: Span) -> Tensor:
        """The bias of a span's pairs, broadcastable to (b, g, c, r, s)."""
        assert self.bias is not None
        if self.line is not None:
            (heads, length), repeat = self.line.shape, self.plan.repeat
            shape = 1, heads // repeat, tile.count, repeat, span.width
            strides = 0, repeat * length, 1, length, 1
            values = self.line.as_strided(shape, strides, self.line_offset(tile, span))
            return values if self.plan.backwards else values.flip(2)
        distance = self.group.mask.distance(tile.rows, span.columns).abs()
        values = self.bias[:, distance.clamp(max=self.bias.shape[1] - 1)]
        # (H, b, 1, c, s) where every batch row has its own positions, else (H, c, s).
        return self.spread(values.squeeze(2).transpose(0, 1) if distance.dim() == 4 else values)

    def enter(self, tile: Tile) -> None:
        """Called before the weights of a tile in a forward."""

    def leave(self, tile: Tile) -> None:
        """Called after the gradients of a tile in a backward."""

    def in_order(self, x: Tensor) -> Tensor:
        """(b, g, c, …) first query first, or in the order of the tile: its own inverse."""
        return x.flip(2) if self.plan.backwards and x.shape[2] > 1 else x

    def _reversed(self, x: Tensor) -> Tensor:
        """(n, c·r, …) with its tokens in the other order, if the plan runs backwards."""
        if not self.plan.backwards:
            return x
        if self.plan.repeat == 1:
            return x.flip(1)
        return torch.unflatten(x, 1, (-1, self.plan.repeat)).flip(1).flatten(1, 2)

    def _rows(self, x: Tensor, tile: Tile) -> Tensor:
        """The rows of a tile in (n, T·r, …)."""
        repeat = self.plan.repeat
        return x.narrow(1, tile.rows.start * repeat, tile.count * repeat)

    def read(self, x: Tensor, tile: Tile) -> Tensor:
        """The rows of a tile in (n, T·r, …), in its order."""
        return self._reversed(self._rows(x, tile))

    def write(self, pairs: Pairs, x: Tensor, tile: Tile) -> None:
        """Σ a·b into the rows of a tile in (n, T·r, E)."""
        target = self._rows(x, tile)
        into = torch.empty_like(target) if self.plan.backwards else target
        first = True
        for a, b in pairs:
            dense = a if a.shape[1] >= _FEW else a.contiguous()
            if first:
                torch.bmm(dense, b, out=into)
            else:
                into.baddbmm_(dense, b)
            first = False
        if first:
            into.zero_()
        if self.plan.backwards:
            target.copy_(self._reversed(into))

    def rows_of(self, x: Tensor, tile: Tile) -> Tensor:
        """The rows of a tile in (B, G, T, r, …), in its order: (b, g, c, r, …)."""
        return self.in_order(x[self.group.batch, self.group.heads, tile.rows])

    def by_head(self, score: Tensor) -> Tensor:
        """(n, c·r, W) as (b, g, c, r, W)."""
        heads = self.group.heads.stop - self.group.heads.start
        repeat, (n, lines, width) = self.plan.repeat, score.shape
        return score.view(n // heads, heads, lines // repeat, repeat, width)

    def spread(self, block: Tensor) -> Tensor:
        """What is broadcastable to (b, h, c, s) and first query first, to (b, g, c, r, s)."""
        if block.dim() < 4:
            block = block[(None,) * (4 - block.dim())]
        one = block.shape[1] == 1
        return self.in_order(block.unsqueeze(3) if one else grouped(block, self.plan.repeat))

    def buffer(self, name: str, tile: Tile) -> Tensor:
        """(n, c·r, W + X) of uninitialised numbers."""
        n, repeat = self.q.shape[0], self.plan.repeat
        shape = n, tile.count * repeat, tile.width + self.extra
        return self.space.take(name, shape, self.q, n * repeat * self._widest)

    def side(self, span: Span) -> tuple[Tensor, Tensor]:
        """All queries, and the keys (n, D, s) of a span, of its regime."""
        if span.far:
            assert self.far_q is not None
            assert self.far_k is not None
            return self.far_q, self.far_k.narrow(2, span.start, span.width)
        start = self.plan.shape.near_start
        return self.q, self.k.narrow(2, span.start - start, span.width)

    def products(self, tile: Tile, into: Tensor) -> None:
        """⟨q, k⟩ of a tile, each span by its regime, into the first W columns."""
        for span, where in tile.placed:
            q, k = self.side(span)
            product(self.read(q, tile), k, into[..., where])

    def accumulate(self, sums: Tensor, tile: Tile, sign: int = 1) -> None:
        """Sums (n, c·r, W or more) ± the products of a tile, in place."""
        if sums.shape[1] < _FEW:
            products = self.buffer("products", tile)[..., : tile.width]
            self.products(tile, products)
            sums[..., : tile.width].add_(products, alpha=sign)
            return
        for span, where in tile.placed:
            q, k = self.side(span)
            sums[..., where].baddbmm_(self.read(q, tile), k, alpha=sign)

    def weights(self, tile: Tile, capped: bool = False, keep: bool = False) -> Tensor:
        """softmax of the tile's scores and further logits, (n, c·r, W + X).

        0 for a query that sees no key. `capped` keeps tanh of the product over the cap for
        `by_product`; `keep` the scores beside their weights, as `kept`.
        """
        score = self.buffer("score", tile)
        biased = self.line is not None and self.inputs.cap is None and score.shape[1] >= _FEW
        if biased:
            # The products are added to the bias: one pass less than the other way round.
            by_head = self.by_head(score)
            for span, where in tile.placed:
                by_head[..., where].copy_(self._bias_of(tile, span))
            self.accumulate(score, tile)
        else:
            self.products(tile, score)
        return self.softmax(score, tile, capped, keep, biased)

    def softmax(
        self, score: Tensor, tile: Tile, capped: bool, keep: bool, biased: bool = False
    ) -> Tensor:
        """Everything that comes after the products, in place; as for `weights`.

        With `keep` the weights have a place of their own; `biased` scores hold the bias already.
        """
        width = tile.width
        if self.inputs.cap is not None:
            tanh = score[..., :width].div_(self.inputs.cap).tanh_()
            if capped:
                self.buffer("tanh", tile)[..., :width].copy_(tanh)
            tanh.mul_(self.inputs.cap)
        if self.bias is not None and not biased:
            for span, where in tile.placed:
                self.by_head(score)[..., where] += self._bias_of(tile, span)
        certain = self._all_hidden or self._hide(self.by_head(score), tile)
        if self.sink is not None:
            self.by_head(score)[..., width].copy_(self.sink)
        if margin := self.space.margin:
            score.narrow(2, score.shape[-1] - margin, margin).fill_(-torch.inf)
        if score.shape[-1] == 0:
            self.kept = score, score
            return score
        nothing = None if certain else (score == -torch.inf).all(-1, keepdim=True)
        weight = torch.softmax(score, -1, out=self.buffer("weight", tile) if keep else score)
        if nothing is not None:
            weight.masked_fill_(nothing, 0.0)
        if keep:
            self.kept = score, weight
        return weight

    def _hide(self, by_head: Tensor, tile: Tile) -> bool:
        """−∞ where no key is seen; whether every row is certain to see one."""
        shape, mask = self.plan.shape, self.group.mask
        if shape.aligned:
            hide_edges(by_head, tile, self.plan, self._hides_future)
            if mask.only_causal_or_window:
                return True
            # Causality and the sliding window are in the edges already.
            mask = replace(mask, causal=False, window=None)
        for span, where in tile.placed:
            score = by_head[..., where]
            added, hidden = (
                mask.additive(tile.rows, span.columns),
                mask.hidden(tile.rows, span.columns),
            )
            if added is not None:
                score += self.spread(added)
            if shape.window is not None and not shape.aligned:
                far = mask.distance(tile.rows, span.columns) >= shape.window
                other = ~far if span.far else far
                hidden = other if hidden is None else hidden | other
            if hidden is not None:
                score.masked_fill_(self.spread(hidden), -torch.inf)
        return False

    def log_sum_exp(self) -> Tensor:
        """ln Σ exp of each row of the last tile that was kept, (b, g, c, r), first to last."""
        assert self.kept is not None
        score, weight = self.kept
        if not score.shape[-1]:
            return self.by_head(score).new_full(self.by_head(score).shape[:-1], -torch.inf)
        top = score.amax(-1, keepdim=True)
        # The largest weight is exp(0) over the sum.
        lse = top - weight.amax(-1, keepdim=True).log()
        lse = lse.masked_fill_(top == -torch.inf, -torch.inf)
        return self.in_order(self.by_head(lse).squeeze(-1))

    def values(self, weight: Tensor, tile: Tile, out: Tensor) -> None:
        """Σ_j weight · v into the tile's rows of `out` (n, T·r, E)."""
        spans, v = tile.spans, self.v
        if weight.shape[1] < _FEW and all(a.stop == b.start for a, b in pairwise(spans)):
            # As in a decoding step: far and near columns follow each other.
            columns = slice(spans[0].start, spans[-1].stop) if spans else slice(0)
            self.write([(weight[..., : tile.width], v[:, columns])], out, tile)
            return
        placed = tile.placed
        pairs = [(weight[..., at], v.narrow(1, s.start, s.width)) for s, at in placed]
        self.write(pairs, out, tile)

    def by_weight(self, by_out: Tensor, tile: Tile) -> Tensor:
        """⟨by_out, v⟩, (n, c·r, W + X); 0 for the further logits, whose values are 0."""
        result = self.buffer("gradient", tile)
        if self.extra:
            result.narrow(2, tile.width, self.extra).zero_()
        for span, where in tile.placed:
            values = self.v.narrow(1, span.start, span.width)
            product(by_out, values.mT, result[..., where])
        return result

    def by_product(self, by_score: Tensor, tile: Tile) -> Tensor:
        """The gradient of the products from that of the scores, which may be overwritten."""
        if self.inputs.cap is not None:
            tanh = self.buffer("tanh", tile)[..., : tile.width]
            by_score[..., : tile.width].mul_(tanh.square_().neg_().add_(1))
        return by_score


MakeScores = Callable[[AttentionInputs, Plan, Group, Workspace], TileScores]
"""How the scores of a group of heads are made: `TileScores`, or residual ones."""


def score_groups(
    inputs: AttentionInputs, plan: Plan, make: MakeScores = TileScores, margin: int = 0
) -> Iterator[TileScores]:
    """The scores of every group of heads, which share their buffers; `group.tiles` are its tiles.

    `inputs` must be in float32 or wider.
    """
    space = Workspace(margin)
    for group in plan.groups(inputs.q):
        yield make(inputs, plan, group, space)


def product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """a·b into `out`; few rows go to a space of their own, as a strided one is slow for them."""
    if a.shape[1] >= _FEW:
        torch.bmm(a, b, out=out)
    else:
        out.copy_(torch.bmm(a, b))
