"""The query rows of some heads: their scores and weights tile by tile, and the way back.

Query heads that share a key head are rows of one product, so keys are never repeated.

Legend: B batch, G key heads, r query heads per key head, T queries, S keys, D score size, E value
size; n = b·g of a group, c token rows of a tile, W its columns, X further logits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor

from normattn.kernels.problem import Problem
from normattn.kernels.score_buffer import LayerScores
from normattn.kernels.tiles import Group, Plan, Span, Tile, hide_edges
from normattn.kernels.visibility import Visibility

# Rows of a product below which a strided operand costs more than a copy of it.
_FEW = 16


def grouped(x: Tensor, repeat: int) -> Tensor:
    """(B, H, T, …) as (B, G, T, r, …)."""
    batch, heads = x.shape[:2]
    return x.reshape(batch, heads // repeat, repeat, *x.shape[2:]).transpose(2, 3)


def ungrouped(x: Tensor) -> Tensor:
    """(B, G, T, r, …) as (B, H, T, …)."""
    return x.transpose(2, 3).flatten(1, 2)


def keep_mask(weight: Tensor, columns: int, rate: float, seed: int) -> Tensor:
    """The dropout mask of a tile, over 1 − rate; the same in forward and backward."""
    generator = torch.Generator(device=weight.device)
    generator.manual_seed(seed)
    shape = (*weight.shape[:-1], columns)
    keep = torch.rand(shape, generator=generator, device=weight.device) >= rate
    return keep.to(weight.dtype) / (1 - rate)


class Scratch:
    """Room for the scores of any tile, taken once: fresh pages cost as much as the arithmetic."""

    def __init__(self, like: Tensor, size: int, dtype: torch.dtype) -> None:
        """Take room for `size` elements."""
        self.room = like.new_empty(size, dtype=dtype)

    def shaped(self, *shape: int) -> Tensor:
        """The first elements in a shape."""
        return self.room[: torch.Size(shape).numel()].view(shape)


@dataclass
class Rows:
    """The operands of one group of heads, flattened: q (n, T·r, D), k (n, S, D), v (n, S, E).

    With `carried` the scores are the sums that stand there, to which `carry` adds products.
    """

    problem: Problem
    plan: Plan
    group: Group
    extra: Tensor | None
    q: Tensor
    k: Tensor
    v: Tensor
    far_q: Tensor | None
    far_k: Tensor | None
    carried: LayerScores | None = None
    turned: dict[str, Tensor] = field(default_factory=dict)
    rooms: dict[str, Scratch] = field(default_factory=dict)
    pair: tuple[Tensor, Tensor] | None = None

    @staticmethod
    def of(
        problem: Problem,
        plan: Plan,
        group: Group,
        extra: Tensor | None = None,
        carried: LayerScores | None = None,
    ) -> Rows:
        """The operands of a group; `extra` (B, G, T, r, X) are further logits of each row."""
        p, at = problem, (group.batch, group.heads)

        def queries(x: Tensor | None) -> Tensor | None:
            return None if x is None else grouped(x, plan.repeat)[at].flatten(0, 1).flatten(1, 2)

        def keys(x: Tensor | None) -> Tensor | None:
            return None if x is None else x[at].flatten(0, 1)

        far_q, far_k = (None, None) if plan.near_only else (queries(p.far_q), keys(p.far_k))
        q, k, v = queries(p.q), keys(p.k), keys(p.v)
        assert q is not None
        assert k is not None
        assert v is not None
        if extra is None and p.sink is not None:
            sink = p.sink.to(p.q.dtype).view(1, -1, 1, plan.repeat, 1)
            extra = sink.expand(p.q.shape[0], -1, plan.queries, -1, -1)
        return Rows(p, plan, group, extra, q, k, v, far_q, far_k, carried)

    def at(self, x: Tensor, tile: Tile) -> Tensor:
        """The rows of a tile in (B, G, T, r, …): (b, g, c, r, …)."""
        return x[self.group.batch, self.group.heads, tile.rows]

    def apart(self, score: Tensor) -> Tensor:
        """(n, c·r, W) as (b, g, c, r, W)."""
        heads = self.group.heads.stop - self.group.heads.start
        repeat, (n, lines, width) = self.plan.repeat, score.shape
        return score.view(n // heads, heads, lines // repeat, repeat, width)

    def lines(self, tile: Tile) -> slice:
        """The rows of a tile in (n, T·r, …)."""
        repeat = self.plan.repeat
        return slice(tile.rows.start * repeat, tile.rows.stop * repeat)

    def room(self, name: str, tile: Tile, dtype: torch.dtype | None = None) -> Tensor:
        """(n, c·r, W + X) of uninitialised scores, by default of the type of q."""
        further = 0 if self.extra is None else self.extra.shape[-1]
        lines = self.lines(tile)
        n = self.q.shape[0]
        if name not in self.rooms:
            largest = max(
                (t.rows.stop - t.rows.start) * (t.width + further) for t in self.plan.tiles
            )
            size = n * self.plan.repeat * largest
            self.rooms[name] = Scratch(self.q, size, self.q.dtype if dtype is None else dtype)
        return self.rooms[name].shaped(n, lines.stop - lines.start, tile.width + further)

    def across(self, name: str, x: Tensor) -> Tensor:
        """xᵀ; in half precision a copy, if many tiles use it: its products are then faster."""
        if x.device.type != "cpu" or x.element_size() != 2 or len(self.plan.tiles) < 4:
            return x.transpose(1, 2)
        if name not in self.turned:
            self.turned[name] = x.transpose(1, 2).contiguous()
        return self.turned[name]

    def side(self, span: Span) -> tuple[Tensor, Tensor, str, slice]:
        """Queries and keys of a span's regime, the name of the keys, and their columns."""
        if span.far:
            assert self.far_q is not None
            assert self.far_k is not None
            return self.far_q, self.far_k, "far_k", span.columns
        start = self.plan.near_start
        return self.q, self.k, "k", slice(span.start - start, span.stop - start)

    def weights(self, tile: Tile, capped: bool = False, kept: bool = False) -> Tensor:
        """softmax of the tile's scores and further logits, (n, c·r, W + X).

        0 for a query that sees no key. `capped` keeps tanh of the product over the cap for
        `uncap`; `kept` the scores beside their weights, as `pair`.
        """
        if self.carried is not None:
            return self._carried_weights(self.carried, tile, capped, kept)
        score = self.room("score", tile)
        self._products(tile, score)
        return self._softmax(score, tile, capped, kept)

    def _carried_weights(
        self, carried: LayerScores, tile: Tile, capped: bool, kept: bool
    ) -> Tensor:
        """The same from the sums, in wide type until the weights are known."""
        sums, score = carried.sums.tile(self.group, tile), self.room("score", tile)
        wide = score if score.dtype == sums.dtype else self.room("wide", tile, sums.dtype)
        bare = self.problem.cap is None and self.problem.bias is None and self.extra is None
        alike = self.plan.aligned and self.group.seen.regular and not kept
        if bare and carried.share == 1 and alike:
            # What causality and the window hide is −∞ in the sums.
            torch.softmax(sums, -1, out=wide)
        else:
            torch.mul(sums, carried.share, out=wide[..., : tile.width])
            wide = self._softmax(wide, tile, capped, kept)
        return wide if wide.dtype == score.dtype else score.copy_(wide)

    def carry(self, tile: Tile) -> None:
        """Add a tile's products to the sums of the layers below."""
        assert self.carried is not None
        sums = self.carried.sums.tile(self.group, tile)
        if not self.carried.lowest:
            self.accumulate(sums, tile)
        elif sums.dtype == self.q.dtype:
            self._products(tile, sums)
        else:
            products = self.room("products", tile)[..., : tile.width]
            self._products(tile, products)
            sums.copy_(products)
        if self.plan.aligned and (self.carried.lowest or not self.carried.finite):
            # Hidden in every layer alike: what is added to −∞, or taken from it, changes nothing,
            # unless it is NaN, which earlier rows would then read.
            hide_edges(self.apart(sums), tile, self.plan.keys - self.plan.queries)

    def accumulate(self, sums: Tensor, tile: Tile, sign: int = 1) -> None:
        """Sums (n, c·r, W) ± the products of a tile, in place."""
        direct = sums.dtype == self.q.dtype and sums.shape[1] >= _FEW
        if not direct:
            products = self.room("products", tile)[..., : tile.width]
            self._products(tile, products)
            sums.add_(products, alpha=sign)
            return
        for span, where in tile.laid():
            q, k, _, columns = self.side(span)
            part = sums[..., where]
            part.baddbmm_(q[:, self.lines(tile)], k[:, columns].transpose(1, 2), alpha=sign)

    def gathered(self, by_score: Tensor, tile: Tile) -> Tensor:
        """The gradient of the sums (n, c·r, W): that of this layer's scores joins those above."""
        assert self.carried is not None
        assert self.carried.gradients is not None
        gradient = self.carried.gradients.tile(self.group, tile)
        mine = by_score[..., : tile.width]
        if self.carried.highest:
            torch.mul(mine, self.carried.share, out=gradient)
        elif self.carried.lowest and gradient.dtype == mine.dtype:
            # Nobody reads it again: written to the tile in the cache, not to memory.
            return torch.add(gradient, mine, alpha=self.carried.share, out=mine)
        else:
            gradient.add_(mine, alpha=self.carried.share)
        return gradient if gradient.dtype == mine.dtype else mine.copy_(gradient)

    def _products(self, tile: Tile, score: Tensor) -> None:
        for span, where in tile.laid():
            q, k, name, columns = self.side(span)
            across = self.across(name, k)
            product(q[:, self.lines(tile)], across, columns, score[..., where])

    def _softmax(self, score: Tensor, tile: Tile, capped: bool, kept: bool = False) -> Tensor:
        """Cap, bias, masks and further logits on a tile's products, and softmax; in place.

        With `kept` the weights have a place of their own.
        """
        apart = self.apart(score)
        if self.problem.cap is not None:
            seen = score[..., : tile.width].div_(self.problem.cap).tanh_()
            if capped:
                self.room("tanh", tile, score.dtype)[..., : tile.width].copy_(seen)
            seen.mul_(self.problem.cap)
        self._add_bias(apart, tile)
        certain = self._hide(apart, tile)
        if self.extra is not None:
            apart[..., tile.width :].copy_(self.at(self.extra, tile))
        if score.shape[-1] == 0:
            return score
        nothing = None if certain else (score == -torch.inf).all(-1, keepdim=True)
        into = self.room("weight", tile, score.dtype) if kept else score
        weight = torch.softmax(score, -1, out=into)
        if nothing is not None:
            weight.masked_fill_(nothing, 0.0)
        if kept:
            self.pair = score, weight
        return weight

    def uncap(self, by_score: Tensor, tile: Tile) -> None:
        """The gradient of the product from that of the capped score, in place."""
        tanh = self.room("tanh", tile)[..., : tile.width]
        by_score[..., : tile.width].mul_(tanh.square_().neg_().add_(1))

    def _add_bias(self, apart: Tensor, tile: Tile) -> None:
        if self.problem.bias is None:
            return
        bias = self.heads(self.problem.bias).to(apart.dtype)
        for span, where in tile.laid():
            distance = self.group.seen.distance(tile.rows, span.columns).abs()
            values = bias[:, distance]
            # (H, b, 1, c, s) where every batch row has its own positions, else (H, c, s).
            values = values.squeeze(2).transpose(0, 1) if distance.dim() == 4 else values
            apart[..., where] += self.spread(values)

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

    def _hide(self, apart: Tensor, tile: Tile) -> bool:
        """−∞ where no key is seen; whether every row is certain to see one."""
        aligned, seen = self.plan.aligned, self.group.seen
        if aligned:
            hide_edges(apart, tile, self.plan.keys - self.plan.queries)
            if seen.regular:
                return True
            # Causality and the sliding window are in the edges already.
            seen = replace(seen, causal=False, window=None)
        for span, where in tile.laid():
            score = apart[..., where]
            added = seen.added(tile.rows, span.columns)
            if added is not None:
                score += self.spread(added)
            hidden = self._hidden(seen, tile, span, aligned)
            if hidden is not None:
                score.masked_fill_(self.spread(hidden), -torch.inf)
        return False

    def _hidden(self, seen: Visibility, tile: Tile, span: Span, aligned: bool) -> Tensor | None:
        hidden = seen.hidden(tile.rows, span.columns)
        if aligned or self.plan.window is None:
            return hidden
        far = seen.distance(tile.rows, span.columns) >= self.plan.window
        other = ~far if span.far else far
        return other if hidden is None else hidden | other

    def values(self, weight: Tensor, tile: Tile, out: Tensor) -> None:
        """Σ_j weight · v into `out` (n, c·r, E)."""
        spans = tile.spans
        if weight.shape[1] < _FEW and all(a.stop == b.start for a, b in pairwise(spans)):
            # As in a decoding step: far and near columns follow each other.
            columns = slice(spans[0].start, spans[-1].stop) if spans else slice(0)
            times([(weight[..., : tile.width], self.v[:, columns])], out)
            return
        times(((weight[..., where], self.v[:, span.columns]) for span, where in tile.laid()), out)

    def by_weight(self, by_out: Tensor, tile: Tile) -> Tensor:
        """⟨by_out, v⟩, (n, c·r, W + X); 0 for the further logits, whose values are 0."""
        result = self.room("gradient", tile)
        if self.extra is not None:
            result[..., tile.width :] = 0
        turned = self.across("v", self.v)
        for span, where in tile.laid():
            product(by_out, turned, span.columns, result[..., where])
        return result


def product(a: Tensor, b: Tensor, columns: slice, out: Tensor) -> None:
    """a·b[columns] into `out`.

    Few rows go to a space of their own, as a strided one is slow for them. Half-precision ones are
    ten times slower still where b is not whole: then all columns are taken, or one head at a time.
    """
    part = b[..., columns]
    if a.shape[1] >= _FEW:
        torch.bmm(a, part, out=out)
    elif a.element_size() != 2 or part.shape[0] == 1 or _dense(part):
        out.copy_(torch.bmm(a, part))
    elif _dense(b) and 2 * part.shape[-1] >= b.shape[-1]:
        out.copy_(torch.bmm(a, b)[..., columns])
    else:
        for number in range(a.shape[0]):
            torch.mm(a[number], part[number], out=out[number])


def _dense(x: Tensor) -> bool:
    return x.is_contiguous() or x.transpose(1, 2).is_contiguous()


def times(pairs: Iterable[tuple[Tensor, Tensor]], out: Tensor) -> None:
    """Σ a·b into `out`."""
    first = True
    for a, b in pairs:
        dense = a if a.shape[1] >= _FEW else a.contiguous()
        if first:
            torch.bmm(dense, b, out=out)
        else:
            out.baddbmm_(dense, b)
        first = False
    if first:
        out.zero_()
