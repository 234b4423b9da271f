"""The tiles by which attention is computed on a CPU, for any inputs and without a T × S matrix.

A tile is some query rows of some heads and the columns that they need. Its scores fit into the
cache, so softmax costs little beside the products. The columns of a tile are spans laid side by
side: near and far keys where there are two regimes, the first keys and the last ones with a sliding
window. So a tile multiplies only what it needs.

Where a bias by distance falls so far that no score can make up for it (`_reach`), the keys beyond
that distance are left out, which is most of them in ALiBi's steep heads.

`tile_scores` computes one tile, `tiled_backward` all of them.

Legend: B batch, H query heads, G key heads, T queries, S keys; c token rows of a tile, W its
columns, r query heads per key head.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from normattn.kernels.inputs import AttentionInputs, AttentionMask
from normattn.kernels.numerics import host_can_read
from normattn.plain import cacheable

# Scores of one tile, in bytes: about the second-level cache of a core; and rows of its products.
TILE_BYTES, ROWS = 2**20, 128
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

    @cached_property
    def width(self) -> int:
        """The number of columns."""
        return self.stop - self.start

    @cached_property
    def columns(self) -> slice:
        """As a slice."""
        return slice(self.start, self.stop)


@dataclass(frozen=True)
class Tile:
    """Token rows and the spans whose columns lie side by side in its scores."""

    rows: slice
    spans: tuple[Span, ...]

    @cached_property
    def count(self) -> int:
        """The number of token rows."""
        return int(self.rows.stop - self.rows.start)

    @cached_property
    def width(self) -> int:
        """The number of columns."""
        return sum(span.width for span in self.spans)

    @cached_property
    def placed(self) -> tuple[tuple[Span, slice], ...]:
        """Each span and where its columns lie in the tile."""
        ends = [sum(span.width for span in self.spans[: n + 1]) for n in range(len(self.spans))]
        return tuple(
            (span, slice(end - span.width, end)) for span, end in zip(self.spans, ends, strict=True)
        )


@dataclass(frozen=True)
class Shape:
    """What decides which tiles there are: sizes, and what hides keys alike in all batch rows.

    `window` parts two regimes; a query sees `sliding` keys before it and the first `kept` ones.
    """

    queries: int
    keys: int
    rows: int
    window: int | None
    near_start: int
    aligned: bool
    causal: bool
    sliding: int | None
    kept: int

    def positions(self, rows: slice) -> tuple[int, int]:
        """The first and the last position of some rows, if they are aligned."""
        shift = self.keys - self.queries
        return rows.start + shift, rows.stop + shift - 1


@lru_cache(maxsize=512)
def make_tiles(shape: Shape, reach: int) -> tuple[Tile, ...]:
    """The tiles of a group of heads that see keys up to distance `reach` − 1, rows upwards."""
    tiles = []
    for start in range(0, shape.queries, shape.rows):
        rows = slice(start, min(start + shape.rows, shape.queries))
        if shape.aligned:
            spans = list(_aligned_spans(shape, rows, reach))
        else:
            # Masks say which keys are visible, and which regime a pair is of.
            spans = [] if shape.window is None else [Span(True, 0, shape.keys)]
            spans.append(Span(False, shape.near_start, shape.keys))
        tiles.append(Tile(rows, tuple(span for span in spans if span.start < span.stop)))
    return tuple(tiles)


def _aligned_spans(shape: Shape, rows: slice, reach: int) -> Iterator[Span]:
    """The columns within `reach` that a row among `rows` sees, with the bounds on i − j."""
    first, last = shape.positions(rows)
    sliding, lowest = shape.sliding, 0 if shape.causal else None
    if sliding is None:
        start, stop = max(0, first - reach + 1), min(shape.keys, last + reach)
        yield from _by_regime(shape, (start, stop), (first, last), lowest, None)
        return
    kept = min(shape.kept, last + 1) if shape.causal else shape.kept
    yield from _by_regime(shape, (0, min(kept, shape.keys)), (first, last), lowest, None)
    begin, lowest = max(0, first - sliding + 1, kept), 1 - sliding if lowest is None else 0
    yield from _by_regime(shape, (begin, shape.keys), (first, last), lowest, sliding - 1)


def _by_regime(
    shape: Shape,
    columns: tuple[int, int],
    positions: tuple[int, int],
    lowest: int | None,
    highest: int | None,
) -> Iterator[Span]:
    """The same columns, without those that no row sees, the distant ones far."""
    (start, stop), (first, last), window = columns, positions, shape.window
    stop = stop if lowest is None else min(stop, last - lowest + 1)
    if window is None:
        yield Span(False, start, stop, lowest, highest)
        return
    low = window if lowest is None else max(lowest, window)
    yield Span(True, start, min(stop, last - window + 1), low, highest)
    high = window - 1 if highest is None else min(highest, window - 1)
    yield Span(False, max(start, first - window + 1), stop, lowest, high)


@dataclass(frozen=True)
class Group:
    """Slices of the batch and of the key heads, their mask, and the tiles that they need."""

    batch: slice
    heads: slice
    mask: AttentionMask
    tiles: tuple[Tile, ...]


@dataclass(frozen=True)
class Plan:
    """How the inputs are cut into groups of heads, and each group into tiles.

    `reach` holds for each query head the distance from which on every weight counts as 0.
    `backwards`: the last query of a tile is its first row, from where its bias by distance is a
    view of one line.
    """

    shape: Shape
    repeat: int
    mask: AttentionMask
    reach: tuple[int, ...] | None
    backwards: bool

    @staticmethod
    def of(inputs: AttentionInputs, narrow: bool = False) -> Plan:
        """The plan of some inputs; `narrow` leaves out the keys beyond the reach of a bias."""
        p, mask, repeat = inputs, inputs.mask, inputs.q.shape[1] // inputs.k.shape[1]
        queries, keys = p.q.shape[2], p.v.shape[2]
        aligned = mask.aligned and queries <= keys
        shape = Shape(
            *(queries, keys, max(1, ROWS // repeat), p.window, p.near_start),
            *(aligned, mask.causal, mask.window, mask.sink_tokens),
        )
        backwards = aligned and p.bias is not None and queries > 1
        return Plan(shape, repeat, mask, _reach(p) if narrow else None, backwards)

    @property
    def tiles(self) -> tuple[Tile, ...]:
        """The tiles of a group that needs every key."""
        return make_tiles(self.shape, self.shape.keys)

    def groups(self, q: Tensor) -> Iterator[Group]:
        """Whole batch rows while they fit into a tile, else heads of one row."""
        batch, heads = q.shape[0], q.shape[1] // self.repeat
        rows = min(self.shape.rows, self.shape.queries) * self.repeat
        width = max((tile.width for tile in self.tiles), default=0)
        many = max(1, TILE_BYTES // max(1, rows * width * max(4, q.element_size())))
        batch_step, head_step = max(1, many // max(1, heads)), min(many, heads)
        for row in range(0, batch, batch_step):
            for start in range(0, heads, head_step):
                stop = min(start + head_step, heads)
                yield self._group(slice(row, min(row + batch_step, batch)), slice(start, stop))

    def _group(self, batch: slice, heads: slice) -> Group:
        queries = slice(heads.start * self.repeat, heads.stop * self.repeat)
        reach = self.shape.keys if self.reach is None else max(self.reach[queries])
        mask = self.mask.select_heads(batch, queries)
        return Group(batch, heads, mask, make_tiles(self.shape, reach))


def _reach(inputs: AttentionInputs) -> tuple[int, ...] | None:
    """For each head a distance from which on every weight is below the normal numbers of q.

    By Cauchy and Schwarz the weight of a key at distance d is at most
    exp(2 max|q| max|k| + b(d) − b(0)), if the key at distance 0 is visible. None where nothing is
    left out, or where to look would cost more than it saves: of few keys, and on another device,
    where the host would have to wait.
    """
    q, k, bias, keys = inputs.q, inputs.k, inputs.bias, inputs.v.shape[2]
    mask = inputs.mask
    sees_itself = mask.only_causal and mask.aligned and q.shape[2] <= keys and inputs.window is None
    if bias is None or not sees_itself or bias.shape[1] < keys:
        return None
    if keys < REACH_FROM or not host_can_read(q):
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


def hide_edges(score: Tensor, tile: Tile, plan: Plan, future: bool = True) -> None:
    """−∞ where i − j leaves a span's bounds: a corner of its columns, alike in most tiles.

    `score` is (…, c, r, width). Not `future` spares keys after the query.
    """
    first, last = plan.shape.positions(tile.rows)
    for span, where in tile.placed:
        corners = []
        if span.lowest is not None and (future or span.lowest != 0):
            begin = max(span.start, first - span.lowest + 1)
            corners.append((begin, span.stop, first - span.lowest - begin + 1, True))
        if span.highest is not None:
            end = min(span.stop, last - span.highest)
            corners.append((span.start, end, first - span.highest - span.start - 1, False))
        for start, stop, diagonal, upper in corners:
            if start < stop:
                begin = where.start + start - span.start
                shape = tile.count, stop - start
                make = _kept_corner if cacheable() else _corner
                corner = make(shape, diagonal, upper, plan.backwards, score.device)
                score[..., begin : begin + stop - start].masked_fill_(corner, -torch.inf)


def _corner(
    shape: tuple[int, int], diagonal: int, upper: bool, backwards: bool, device: torch.device
) -> Tensor:
    """True on and above, or on and below, a diagonal, (c, 1, s)."""
    with torch.inference_mode(False):
        ones = torch.ones(shape, dtype=torch.bool, device=device)
        corner = ones.triu(diagonal) if upper else ones.tril(diagonal)
        return (corner.flip(0) if backwards else corner)[:, None]


_kept_corner = lru_cache(maxsize=256)(_corner)
