"""Attention by tiles on a CPU: no T × S matrix, any mask, value size, bias, cap, sink, two regimes.

A tile is some query rows of some heads and the columns that they need. Its scores fit into the
cache, so softmax costs little beside the products; the backward (`tiled_backward`) computes them
once more instead of keeping them. The columns of a tile are spans laid side by side: near and far
keys where there are two regimes, the first keys and the last ones with a sliding window. So a tile
multiplies only what it needs. Half-precision inputs are widened to float32: no score is rounded.

A bias by distance is one (c, S + c) Toeplitz matrix per group of heads; the bias of each of its
tiles is a slice of it. Where a bias falls so far that no score can make up for it (`_reach`), the
keys beyond that distance are left out, which is most of them in ALiBi's steep heads.

Legend: B batch, H query heads, G key heads, r query heads per key head, T queries, S keys, D score
size, E value size; n = b·g key heads of a group, c token rows of a tile, W its columns, X further
logits (1 with a sink, else 0).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from normattn.kernels.inputs import AttentionInputs, AttentionMask
from normattn.kernels.numerics import readable

# Scores of one tile, in bytes: about the second-level cache of a core; and rows of its products.
TILE_BYTES, ROWS = 2**20, 128
# Rows of a product below which a strided operand costs more than a copy of it.
_FEW = 16
# Keys from which on the reach of a bias is worth computing.
REACH_FROM = 512


@dataclass(frozen=True)
class Span:
    """Columns `start` … `stop` − 1, seen where `lowest` ≤ i − j ≤ `highest`; of the far regime?"""

    far: bool
    start: int
    stop: int
    lowest: int | None = None
    highest: int | None = None

    @property
    def columns(self) -> slice:
        """As a slice."""
        return slice(self.start, self.stop)


@dataclass(frozen=True)
class Tile:
    """Token rows and the spans whose columns lie side by side in its scores."""

    rows: slice
    spans: tuple[Span, ...]

    @property
    def width(self) -> int:
        """The number of columns."""
        return sum(span.stop - span.start for span in self.spans)

    def laid(self) -> Iterator[tuple[Span, slice]]:
        """Each span and where its columns lie in the tile."""
        at = 0
        for span in self.spans:
            end = at + span.stop - span.start
            yield span, slice(at, end)
            at = end


@dataclass(frozen=True)
class Group:
    """Slices of the batch and of the key heads, their mask, and the tiles that they need."""

    batch: slice
    heads: slice
    seen: AttentionMask
    tiles: tuple[Tile, ...]


@dataclass(frozen=True)
class Plan:
    """How the inputs are cut into groups of heads, and each group into tiles.

    `reach` holds for each query head the distance from which on every weight counts as 0.
    """

    queries: int
    keys: int
    repeat: int
    rows: int
    window: int | None
    near_start: int
    seen: AttentionMask
    reach: tuple[int, ...] | None = None

    @staticmethod
    def of(inputs: AttentionInputs, narrow: bool = False) -> Plan:
        """The plan of some inputs; `narrow` leaves out the keys beyond the reach of a bias."""
        q = inputs.q
        repeat = q.shape[1] // inputs.k.shape[1]
        return Plan(
            *(q.shape[2], inputs.v.shape[2], repeat, max(1, ROWS // repeat), inputs.window),
            *(inputs.near_start, inputs.visibility, _reach(inputs) if narrow else None),
        )

    @property
    def aligned(self) -> bool:
        """Whether i − j is known from the row and the column alone."""
        return self.seen.aligned and self.queries <= self.keys

    def alone(self, group: Group) -> bool:
        """Whether one near span of one tile of a group holds every column."""
        spans = [(span.far, span.columns) for tile in group.tiles for span in tile.spans]
        return spans == [(False, slice(0, self.keys))] and self.near_start == 0

    def groups(self, q: Tensor) -> Iterator[Group]:
        """Whole batch rows while they fit into a tile, else heads of one row."""
        batch, heads = q.shape[0], q.shape[1] // self.repeat
        rows = min(self.rows, self.queries) * self.repeat
        width = max((tile.width for tile in self.tiles), default=0)
        many = max(1, TILE_BYTES // max(1, rows * width * max(4, q.element_size())))
        if many >= heads:
            step = many // heads
            for start in range(0, batch, step):
                yield self._group(slice(start, min(start + step, batch)), slice(0, heads))
            return
        for row in range(batch):
            for start in range(0, heads, many):
                yield self._group(slice(row, row + 1), slice(start, min(start + many, heads)))

    def _group(self, batch: slice, heads: slice) -> Group:
        queries = slice(heads.start * self.repeat, heads.stop * self.repeat)
        tiles = self.tiles
        if self.reach is not None:
            tiles = self._tiles(max(self.reach[queries]))
        return Group(batch, heads, self.seen.of_heads(batch, queries), tiles)

    @cached_property
    def tiles(self) -> tuple[Tile, ...]:
        """The tiles of a group that needs every key, rows upwards."""
        return self._tiles(self.keys)

    def _tiles(self, reach: int) -> tuple[Tile, ...]:
        tiles = []
        for start in range(0, self.queries, self.rows):
            rows = slice(start, min(start + self.rows, self.queries))
            spans = self._aligned(rows, reach) if self.aligned else self._whole()
            tiles.append(Tile(rows, tuple(span for span in spans if span.start < span.stop)))
        return tuple(tiles)

    def _whole(self) -> Iterator[Span]:
        """Every column: masks say what is seen."""
        if self.window is not None:
            yield Span(far=True, start=0, stop=self.keys)
        yield Span(far=False, start=self.near_start, stop=self.keys)

    def _aligned(self, rows: slice, reach: int) -> Iterator[Span]:
        """The columns within `reach` that a row among `rows` sees, with the bounds on i − j."""
        first = rows.start + self.keys - self.queries
        last = rows.stop + self.keys - self.queries - 1
        sliding, kept = self.seen.window, self.seen.kept
        lowest = 0 if self.seen.causal else None
        if sliding is None:
            bounds = max(0, first - reach + 1), min(self.keys, last + reach)
            yield from self._regimes(bounds, first, last, lowest, None)
            return
        begin = max(0, first - sliding + 1)
        kept = min(kept, last + 1) if self.seen.causal else kept
        yield from self._regimes((0, min(kept, self.keys)), first, last, lowest, None)
        lowest = 1 - sliding if lowest is None else lowest
        bounds = (max(begin, kept), self.keys)
        yield from self._regimes(bounds, first, last, lowest, sliding - 1)

    def _regimes(
        self,
        bounds: tuple[int, int],
        first: int,
        last: int,
        lowest: int | None,
        highest: int | None,
    ) -> Iterator[Span]:
        """Columns within `bounds`, the distant ones far."""
        start, stop = bounds
        # Columns that even the last row is too near to, or the first too far from, are left out.
        stop = stop if lowest is None else min(stop, last - lowest + 1)
        if self.window is None:
            yield Span(False, start, stop, lowest, highest)
            return
        end = min(stop, last - self.window + 1)
        low = self.window if lowest is None else max(lowest, self.window)
        yield Span(True, start, end, low, highest)
        high = self.window - 1 if highest is None else min(highest, self.window - 1)
        begin = max(start, first - self.window + 1)
        yield Span(False, begin, stop, lowest, high)


def _reach(inputs: AttentionInputs) -> tuple[int, ...] | None:
    """For each head a distance from which on every weight is below the normal numbers of q.

    By Cauchy and Schwarz the weight of a key at distance d is at most
    exp(2 max|q| max|k| + b(d) − b(0)), if the key at distance 0 is seen. None where nothing is
    left out, or where to ask would cost more than it saves: of few keys, and on another device,
    where the host would have to wait.
    """
    q, k, bias, keys = inputs.q, inputs.k, inputs.bias, inputs.v.shape[2]
    seen = inputs.visibility
    itself = seen.plain and seen.aligned and q.shape[2] <= keys and inputs.window is None
    if bias is None or not itself or keys < REACH_FROM or bias.shape[1] < keys or not readable(q):
        return None
    least = math.log(torch.finfo(q.dtype).smallest_normal)
    fall = bias.detach()[:, :keys] - bias.detach()[:, :1]
    if fall.amin() >= least:
        return None
    of_q, of_k = (torch.linalg.vector_norm(x.detach(), dim=-1).amax((0, 2)) for x in (q, k))
    most = fall + 2 * (of_q * of_k.repeat_interleave(len(of_q) // len(of_k)))[:, None]
    unseen = (most < least).flip(-1).to(torch.uint8)
    # How many distances at the end are all below.
    return tuple(keys - n for n in unseen.cumprod(-1).sum(-1).tolist())


def hide_edges(score: Tensor, tile: Tile, shift: int) -> None:
    """−∞ where i − j leaves a span's bounds: a corner of its columns, alike in most tiles.

    `score` is (…, c, r, width); `shift` is S − T.
    """
    first, last = tile.rows.start + shift, tile.rows.stop + shift - 1
    count, device = last - first + 1, score.device
    for span, at in tile.laid():
        if span.lowest is not None:
            begin = max(span.start, first - span.lowest + 1)
            if begin < span.stop:
                width = span.stop - begin
                corner = _corner((count, width), first - span.lowest - begin + 1, True, device)
                _hide(score[..., at.stop - width : at.stop], corner)
        if span.highest is not None:
            end = min(span.stop, last - span.highest)
            if end > span.start:
                width = end - span.start
                diagonal = first - span.highest - span.start - 1
                corner = _corner((count, width), diagonal, False, device)
                _hide(score[..., at.start : at.start + width], corner)


def _hide(score: Tensor, corner: Tensor) -> None:
    score.masked_fill_(corner[:, None], -torch.inf)


@lru_cache(maxsize=256)
def _corner(shape: tuple[int, int], diagonal: int, upper: bool, device: torch.device) -> Tensor:
    """True on and above, or on and below, a diagonal."""
    with torch.inference_mode(False):
        ones = torch.ones(shape, dtype=torch.bool, device=device)
        return ones.triu(diagonal) if upper else ones.tril(diagonal)


def grouped(x: Tensor, repeat: int) -> Tensor:
    """(B, H, T, …) as (B, G, T, r, …)."""
    batch, heads = x.shape[:2]
    return x.reshape(batch, heads // repeat, repeat, *x.shape[2:]).transpose(2, 3)


def ungrouped(x: Tensor) -> Tensor:
    """(B, G, T, r, …) as (B, H, T, …)."""
    return x.transpose(2, 3).flatten(1, 2)


class TileScores:
    """The scores and weights of one group of heads, tile by tile.

    Query heads that share a key head are rows of one product, so keys are never repeated:
    q (n, T·r, D), k (n, S, D), v (n, S, E). `pair` holds the scores and weights of the last tile
    whose scores were to be `kept`.
    """

    def __init__(self, inputs: AttentionInputs, plan: Plan, group: Group) -> None:
        """Nothing is computed yet."""
        at = (group.batch, group.heads)

        def queries(x: Tensor) -> Tensor:
            return grouped(x, plan.repeat)[at].flatten(0, 1).flatten(1, 2)

        self.inputs, self.plan, self.group = inputs, plan, group
        self.q = queries(inputs.q)
        self.k, self.v = inputs.k[at].flatten(0, 1), inputs.v[at].flatten(0, 1)
        self.far_q = self.far_k = self.sink = None
        if inputs.far_q is not None and inputs.far_k is not None:
            self.far_q, self.far_k = queries(inputs.far_q), inputs.far_k[at].flatten(0, 1)
        if inputs.sink is not None:
            self.sink = inputs.sink.to(self.q.dtype).view(-1, 1, plan.repeat, 1)[group.heads]
        self.further = 0 if self.sink is None else 1
        self.toeplitz: Tensor | None = None
        if inputs.bias is not None and plan.aligned:
            self.toeplitz = self._toeplitz(self.heads(inputs.bias).to(self.q.dtype))
        self.pair: tuple[Tensor, Tensor] | None = None
        self._rooms: dict[str, Tensor] = {}

    def _toeplitz(self, bias: Tensor) -> Tensor:
        """b(h, |r − x + S − 1|) of row r and column x of any tile, (H, c, ·).

        Column x of a tile whose first row is at position i is the key i + x − (S − 1).
        """
        rows, keys = max(1, min(self.plan.rows, self.plan.queries)), self.plan.keys
        width = keys + (rows if self.plan.seen.causal else keys) - 1
        distance = (keys + rows - 2 - torch.arange(width + rows - 1, device=bias.device)).abs()
        line = bias[:, distance.clamp_(max=bias.shape[1] - 1)]
        # Entry (r, x) is line[x − r + c − 1]. In copies of the line side by side, each row of the
        # matrix starts one entry less than a line after the one above.
        heads, length = line.shape
        strides = rows * length, length - 1, 1
        return line.repeat(1, rows).as_strided((heads, rows, width), strides, rows - 1)

    def bias_of(self, tile: Tile, span: Span) -> Tensor:
        """The bias of a span's pairs, broadcastable to (b, g, c, r, s)."""
        first = tile.rows.start + self.plan.keys - self.plan.queries
        if self.toeplitz is not None:
            start = span.start - first + self.plan.keys - 1
            rows = slice(0, tile.rows.stop - tile.rows.start)
            return self.spread(self.toeplitz[:, rows, start : start + span.stop - span.start])
        assert self.inputs.bias is not None
        bias = self.heads(self.inputs.bias).to(self.q.dtype)
        distance = self.group.seen.distance(tile.rows, span.columns).abs()
        values = bias[:, distance.clamp(max=bias.shape[1] - 1)]
        # (H, b, 1, c, s) where every batch row has its own positions, else (H, c, s).
        return self.spread(values.squeeze(2).transpose(0, 1) if distance.dim() == 4 else values)

    def enter(self, tile: Tile) -> None:
        """Called before the weights of a tile in a forward."""

    def leave(self, tile: Tile) -> None:
        """Called after the gradients of a tile in a backward."""

    def lines(self, tile: Tile) -> slice:
        """The rows of a tile in (n, T·r, …)."""
        repeat = self.plan.repeat
        return slice(tile.rows.start * repeat, tile.rows.stop * repeat)

    def rows_of(self, x: Tensor, tile: Tile) -> Tensor:
        """The rows of a tile in (B, G, T, r, …): (b, g, c, r, …)."""
        return x[self.group.batch, self.group.heads, tile.rows]

    def apart(self, score: Tensor) -> Tensor:
        """(n, c·r, W) as (b, g, c, r, W)."""
        heads = self.group.heads.stop - self.group.heads.start
        repeat, (n, lines, width) = self.plan.repeat, score.shape
        return score.view(n // heads, heads, lines // repeat, repeat, width)

    def spread(self, block: Tensor) -> Tensor:
        """What is broadcastable to (b, h, c, s), to (b, g, c, r, s)."""
        if block.dim() < 4:
            block = block[(None,) * (4 - block.dim())]
        return block.unsqueeze(3) if block.shape[1] == 1 else grouped(block, self.plan.repeat)

    def heads(self, x: Tensor) -> Tensor:
        """The query heads of the group in (H, …)."""
        apart = x.reshape(-1, self.plan.repeat, *x.shape[1:])
        return apart[self.group.heads].flatten(0, 1)

    def room(self, name: str, tile: Tile) -> Tensor:
        """(n, c·r, W + X) of uninitialised numbers, taken once for any tile.

        Fresh pages cost as much as the arithmetic.
        """
        q, plan = self.q, self.plan
        if name not in self._rooms:
            largest = max(
                (t.rows.stop - t.rows.start) * (t.width + self.further) for t in self.group.tiles
            )
            self._rooms[name] = q.new_empty(q.shape[0] * plan.repeat * largest)
        lines = self.lines(tile)
        shape = torch.Size((q.shape[0], lines.stop - lines.start, tile.width + self.further))
        return self._rooms[name][: shape.numel()].view(shape)

    def side(self, span: Span) -> tuple[Tensor, Tensor, slice]:
        """Queries and keys of a span's regime, and its columns among these keys."""
        if span.far:
            assert self.far_q is not None
            assert self.far_k is not None
            return self.far_q, self.far_k, span.columns
        start = self.plan.near_start
        return self.q, self.k, slice(span.start - start, span.stop - start)

    def products(self, tile: Tile, into: Tensor) -> None:
        """⟨q, k⟩ of a tile, each span by its regime, into the first W columns."""
        for span, where in tile.laid():
            q, k, columns = self.side(span)
            product(q[:, self.lines(tile)], k[:, columns].transpose(1, 2), into[..., where])

    def accumulate(self, sums: Tensor, tile: Tile, sign: int = 1) -> None:
        """Sums (n, c·r, W) ± the products of a tile, in place."""
        if sums.shape[1] < _FEW:
            products = self.room("products", tile)[..., : tile.width]
            self.products(tile, products)
            sums.add_(products, alpha=sign)
            return
        for span, where in tile.laid():
            q, k, columns = self.side(span)
            part = k[:, columns].transpose(1, 2)
            sums[..., where].baddbmm_(q[:, self.lines(tile)], part, alpha=sign)

    def weights(self, tile: Tile, capped: bool = False, kept: bool = False) -> Tensor:
        """softmax of the tile's scores and further logits, (n, c·r, W + X).

        0 for a query that sees no key. `capped` keeps tanh of the product over the cap for
        `by_product`; `kept` the scores beside their weights, as `pair`.
        """
        score = self.room("score", tile)
        if self.toeplitz is None or self.inputs.cap is not None or score.shape[1] < _FEW:
            self.products(tile, score)
            return self.softmax(score, tile, capped, kept)
        # The products are added to the bias: one pass less than the other way round.
        apart = self.apart(score)
        for span, where in tile.laid():
            apart[..., where].copy_(self.bias_of(tile, span))
        self.accumulate(score[..., : tile.width], tile)
        return self.softmax(score, tile, capped, kept, biased=True)

    def softmax(
        self, score: Tensor, tile: Tile, capped: bool, kept: bool, biased: bool = False
    ) -> Tensor:
        """Everything that comes after the products, in place; as for `weights`.

        With `kept` the weights have a place of their own; `biased` scores hold the bias already.
        """
        apart = self.apart(score)
        if self.inputs.cap is not None:
            seen = score[..., : tile.width].div_(self.inputs.cap).tanh_()
            if capped:
                self.room("tanh", tile)[..., : tile.width].copy_(seen)
            seen.mul_(self.inputs.cap)
        if self.inputs.bias is not None and not biased:
            for span, where in tile.laid():
                apart[..., where] += self.bias_of(tile, span)
        certain = self._hide(apart, tile)
        if self.sink is not None:
            apart[..., tile.width :].copy_(self.sink)
        if score.shape[-1] == 0:
            self.pair = score, score
            return score
        nothing = None if certain else (score == -torch.inf).all(-1, keepdim=True)
        weight = torch.softmax(score, -1, out=self.room("weight", tile) if kept else score)
        if nothing is not None:
            weight.masked_fill_(nothing, 0.0)
        if kept:
            self.pair = score, weight
        return weight

    def log_sum_exp(self) -> Tensor:
        """ln Σ exp of each row of the last tile that was `kept`, (b, g, c, r)."""
        assert self.pair is not None
        score, weight = self.pair
        if not score.shape[-1]:
            return self.apart(score).new_full(self.apart(score).shape[:-1], -torch.inf)
        top = score.amax(-1, keepdim=True)
        # The largest weight is exp(0) over the sum.
        lse = (top - weight.amax(-1, keepdim=True).log()).masked_fill_(
            top == -torch.inf, -torch.inf
        )
        return self.apart(lse).squeeze(-1)

    def by_product(self, by_score: Tensor, tile: Tile) -> Tensor:
        """The gradient of the products from that of the scores, which may be overwritten."""
        if self.inputs.cap is not None:
            tanh = self.room("tanh", tile)[..., : tile.width]
            by_score[..., : tile.width].mul_(tanh.square_().neg_().add_(1))
        return by_score

    def values(self, weight: Tensor, tile: Tile, out: Tensor) -> None:
        """Σ_j weight · v into `out` (n, c·r, E)."""
        spans, v = tile.spans, self.v
        if weight.shape[1] < _FEW and all(a.stop == b.start for a, b in pairwise(spans)):
            # As in a decoding step: far and near columns follow each other.
            columns = slice(spans[0].start, spans[-1].stop) if spans else slice(0)
            times([(weight[..., : tile.width], v[:, columns])], out)
            return
        times(((weight[..., where], v[:, span.columns]) for span, where in tile.laid()), out)

    def _hide(self, apart: Tensor, tile: Tile) -> bool:
        """−∞ where no key is seen; whether every row is certain to see one."""
        plan, seen = self.plan, self.group.seen
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
                score += self.spread(added)
            hidden = self._hidden(seen, tile, span)
            if hidden is not None:
                score.masked_fill_(self.spread(hidden), -torch.inf)
        return False

    def _hidden(self, seen: AttentionMask, tile: Tile, span: Span) -> Tensor | None:
        """What no row may see in a span, and pairs of the other regime."""
        hidden = seen.hidden(tile.rows, span.columns)
        if self.plan.aligned or self.plan.window is None:
            return hidden
        far = seen.distance(tile.rows, span.columns) >= self.plan.window
        other = ~far if span.far else far
        return other if hidden is None else hidden | other


def product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """a·b into `out`; few rows go to a space of their own, as a strided one is slow for them."""
    if a.shape[1] >= _FEW:
        torch.bmm(a, b, out=out)
    else:
        out.copy_(torch.bmm(a, b))


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
