"""How attention on a CPU is divided into tiles, so that no T × S matrix is needed.

A tile has some query rows of some heads, and only the key columns that these rows need. Its scores
fit into the cache, so softmax costs little compared with the products. A tile's columns are spans
side by side: near and far keys with two regimes, sink tokens and recent keys with a sliding window.

A bias by distance may fall so far that no score can make up for it. Keys beyond that distance are
left out (`_max_reach`), which is most keys in ALiBi's steep heads.

`tile_scores` computes one tile, `tiled_backward` all of them.

Legend: B batch, H query heads, G key heads, T queries, S keys; c query rows of a tile, W its
columns, r query heads per key head.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from normattn.kernels.inputs import AttentionInputs, AttentionMask
from normattn.kernels.numerics import host_can_read
from normattn.plain import cacheable

# The scores of a tile in bytes, about a core's second-level cache; and the rows of its products.
TILE_BYTES, ROWS = 2**20, 128
# With fewer keys, computing the reach of a bias costs more than it saves.
REACH_FROM = 512


@dataclass(frozen=True)
class Span:
    """Columns `start` … `stop` − 1, of far keys if `far`, where i − j is within the bounds."""

    far: bool
    start: int
    stop: int
    min_distance: int | None = None
    max_distance: int | None = None

    @cached_property
    def width(self) -> int:
        """The number of columns."""
        return self.stop - self.start

    @cached_property
    def columns(self) -> slice:
        """The columns as a slice."""
        return slice(self.start, self.stop)


@dataclass(frozen=True)
class Tile:
    """Query rows, and the spans whose columns are side by side in the scores."""

    rows: slice
    spans: tuple[Span, ...]

    @cached_property
    def num_rows(self) -> int:
        """The number of query rows."""
        return int(self.rows.stop - self.rows.start)

    @cached_property
    def width(self) -> int:
        """The number of columns."""
        return sum(span.width for span in self.spans)

    @cached_property
    def span_columns(self) -> tuple[tuple[Span, slice], ...]:
        """Each span with its columns within the tile."""
        starts = accumulate((span.width for span in self.spans), initial=0)
        return tuple(
            (x, slice(at, at + x.width)) for x, at in zip(self.spans, starts, strict=False)
        )


@dataclass(frozen=True)
class TileShape:
    """Everything that tiles depend on: the cache key of `make_tiles`.

    `rows` counts the query rows of a tile; other fields are as in `AttentionInputs` and its mask.
    """

    queries: int
    keys: int
    rows: int
    far_from: int | None
    near_start: int
    aligned: bool
    causal: bool
    window: int | None
    sink_tokens: int

    def positions(self, rows: slice) -> tuple[int, int]:
        """The first and last position of aligned rows."""
        shift = self.keys - self.queries
        return rows.start + shift, rows.stop + shift - 1


@lru_cache(maxsize=512)
def make_tiles(shape: TileShape, reach: int) -> tuple[Tile, ...]:
    """The tiles of heads that need keys up to distance `reach` − 1, first rows first."""
    tiles = []
    for start in range(0, shape.queries, shape.rows):
        rows = slice(start, min(start + shape.rows, shape.queries))
        if shape.aligned:
            spans = _aligned_spans(shape, rows, reach)
        else:
            # Masks say which keys are visible and which pairs are far.
            spans = [] if shape.far_from is None else [Span(True, 0, shape.keys)]
            spans.append(Span(False, shape.near_start, shape.keys))
        tiles.append(Tile(rows, tuple(span for span in spans if span.start < span.stop)))
    return tuple(tiles)


def _aligned_spans(shape: TileShape, rows: slice, reach: int) -> list[Span]:
    """Spans of the columns within `reach` that a row sees, with bounds on i − j; may be empty."""
    first, last = shape.positions(rows)
    window, far_from, lowest = shape.window, shape.far_from, 0 if shape.causal else None
    if window is None:
        start, stop = max(0, first - reach + 1), min(shape.keys, last + reach)
        bounds: list[tuple[int, int, int | None, int | None]] = [(start, stop, lowest, None)]
    else:
        sinks = min(shape.sink_tokens, last + 1) if shape.causal else shape.sink_tokens
        start, nearest = max(0, first - window + 1, sinks), 0 if shape.causal else 1 - window
        bounds = [(0, min(sinks, shape.keys), lowest, None)]
        bounds.append((start, shape.keys, nearest, window - 1))
    spans = []
    for start, stop, low, high in bounds:
        stop = stop if low is None else min(stop, last - low + 1)
        if far_from is None:
            spans.append(Span(False, start, stop, low, high))
        else:
            far_low = far_from if low is None else max(low, far_from)
            spans.append(Span(True, start, min(stop, last - far_from + 1), far_low, high))
            near_high = far_from - 1 if high is None else min(high, far_from - 1)
            spans.append(Span(False, max(start, first - far_from + 1), stop, low, near_high))
    return spans


@dataclass(frozen=True)
class HeadGroup:
    """Some batch rows and key heads that are computed together, with their mask and tiles."""

    batch: slice
    heads: slice
    mask: AttentionMask
    tiles: tuple[Tile, ...]


@dataclass(frozen=True)
class TilePlan:
    """How inputs are divided into groups of heads, and groups into tiles.

    `repeat` is the number of query heads per key head. `reach` holds for each query head the
    distance from which every weight counts as 0. `last_row_first` reverses the rows of each tile,
    so that its bias by distance is a view of one line (`tile_scores`).
    """

    shape: TileShape
    repeat: int
    mask: AttentionMask
    reach: tuple[int, ...] | None
    last_row_first: bool

    @staticmethod
    def of(inputs: AttentionInputs, limit_reach: bool = False) -> TilePlan:
        """The plan of the inputs; `limit_reach` leaves out keys beyond the reach of a bias."""
        mask, repeat = inputs.mask, inputs.q.shape[1] // inputs.k.shape[1]
        queries, keys = inputs.q.shape[2], inputs.v.shape[2]
        aligned = mask.aligned and queries <= keys
        shape = TileShape(
            *(queries, keys, max(1, ROWS // repeat), inputs.far_from, inputs.near_start),
            *(aligned, mask.causal, mask.window, mask.sink_tokens),
        )
        reach = _max_reach(inputs) if limit_reach else None
        last_row_first = aligned and inputs.bias is not None and queries > 1
        return TilePlan(shape, repeat, mask, reach, last_row_first)

    @property
    def tiles(self) -> tuple[Tile, ...]:
        """The tiles of a group that needs all keys."""
        return make_tiles(self.shape, self.shape.keys)

    def groups(self, q: Tensor) -> Iterator[HeadGroup]:
        """Group whole batch rows as long as they fit into a tile, else heads of one row."""
        batch, heads = q.shape[0], q.shape[1] // self.repeat
        rows = min(self.shape.rows, self.shape.queries) * self.repeat
        width = max((tile.width for tile in self.tiles), default=0)
        fitting = max(1, TILE_BYTES // max(1, rows * width * max(4, q.element_size())))
        batch_step, head_step = max(1, fitting // max(1, heads)), min(fitting, heads)
        for row in range(0, batch, batch_step):
            for start in range(0, heads, head_step):
                stop = min(start + head_step, heads)
                group = slice(row, min(row + batch_step, batch)), slice(start, stop)
                queries = slice(start * self.repeat, stop * self.repeat)
                reach = self.shape.keys if self.reach is None else max(self.reach[queries])
                mask = self.mask.block(group[0], queries)
                yield HeadGroup(*group, mask, make_tiles(self.shape, reach))


def _max_reach(inputs: AttentionInputs) -> tuple[int, ...] | None:
    """For each head the distance from which every weight is below the normal numbers of q's dtype.

    By Cauchy and Schwarz the weight of a key at distance d is at most
    exp(2 max|q| max|k| + b(d) − b(0)), if the key at distance 0 is visible. None if no key can be
    left out, or if finding out would cost too much: few keys, or a device the host waits for.
    """
    q, k, bias, mask, keys = inputs.q, inputs.k, inputs.bias, inputs.mask, inputs.v.shape[2]
    if bias is None or not (REACH_FROM <= keys <= bias.shape[1]) or not host_can_read(q):
        return None
    sees_itself = mask.only_causal and mask.aligned and q.shape[2] <= keys
    if not sees_itself or inputs.far_from is not None:
        return None
    least = math.log(torch.finfo(q.dtype).smallest_normal)
    fall = bias.detach()[:, :keys] - bias.detach()[:, :1]
    if fall.amin() >= least:
        return None
    max_q, max_k = (torch.linalg.vector_norm(x.detach(), dim=-1).amax((0, 2)) for x in (q, k))
    bound = fall + 2 * (max_q * max_k.repeat_interleave(len(max_q) // len(max_k)))[:, None]
    negligible = (bound < least).flip(-1).to(torch.uint8)
    # cumprod counts the last distances that are all negligible.
    return tuple(keys - n for n in negligible.cumprod(-1).sum(-1).tolist())


def mask_edges(score: Tensor, tile: Tile, plan: TilePlan) -> None:
    """Set scores (…, c, r, W) to −∞ where i − j leaves a span's bounds: corners of its columns."""
    first, last = plan.shape.positions(tile.rows)
    for span, columns in tile.span_columns:
        corners = []
        if span.min_distance is not None:
            begin = max(span.start, first - span.min_distance + 1)
            corners.append((begin, span.stop, first - span.min_distance - begin + 1, True))
        if span.max_distance is not None:
            end = min(span.stop, last - span.max_distance)
            corners.append((span.start, end, first - span.max_distance - span.start - 1, False))
        for start, stop, diagonal, upper in corners:
            if start < stop:
                begin = columns.start + start - span.start
                shape = tile.num_rows, stop - start
                make = _cached_corner if cacheable() else _corner
                corner = make(shape, diagonal, upper, plan.last_row_first, score.device)
                score[..., begin : begin + stop - start].masked_fill_(corner, -torch.inf)


def _corner(
    shape: tuple[int, int], diagonal: int, upper: bool, reverse: bool, device: torch.device
) -> Tensor:
    """True on and above, or on and below, a diagonal: (c, 1, s)."""
    with torch.inference_mode(False):
        ones = torch.ones(shape, dtype=torch.bool, device=device)
        corner = ones.triu(diagonal) if upper else ones.tril(diagonal)
        return (corner.flip(0) if reverse else corner)[:, None]


_cached_corner = lru_cache(maxsize=256)(_corner)
