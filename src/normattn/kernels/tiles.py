"""A tile: some query rows of some heads and the columns that they need, small enough for the cache.

The columns of a tile are spans laid side by side: in two regimes the near keys and the far ones,
with a sliding window the first keys that stay and the last ones. So a tile multiplies only what it
needs, and near and far together are about the pairs of one causal attention.

Legend: B batch, G key heads, r query heads per key head, T queries, S keys; c token rows of a tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from normattn.kernels.place import on_cpu
from normattn.kernels.problem import Problem
from normattn.kernels.visibility import Visibility

# Scores of one tile, in bytes: about the second-level cache of a core.
TILE_BYTES = 2**20
# Rows of a tile's products. Fewer waste fewer hidden pairs, above all in a narrow band;
# half-precision products want more.
ROWS, NEAR_ROWS, HALF_ROWS = 128, 64, 256
# On a GPU a tile must fill the device instead.
DEVICE_TILE_BYTES, DEVICE_ROWS = 2**28, 256


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
    """Slices of the batch and of the key heads, and who may see whom in this part of the batch."""

    batch: slice
    heads: slice
    seen: Visibility


@dataclass(frozen=True)
class Plan:
    """How a problem is cut: `near_only` leaves the far columns to another kernel."""

    queries: int
    keys: int
    repeat: int
    rows: int
    window: int | None
    near_start: int
    near_only: bool
    seen: Visibility

    @staticmethod
    def of(problem: Problem, near_only: bool = False) -> Plan:
        """The plan of a problem."""
        q = problem.q
        repeat = q.shape[1] // problem.k.shape[1]
        rows = max(1, _rows(q, near_only) // repeat)
        return Plan(
            *(q.shape[2], problem.v.shape[2], repeat, rows, problem.window),
            *(problem.near_start, near_only, problem.visibility),
        )

    @property
    def aligned(self) -> bool:
        """Whether i − j is known from the row and the column alone."""
        return self.seen.aligned and self.queries <= self.keys

    @property
    def alone(self) -> bool:
        """Whether one near span of one tile holds every column."""
        spans = [(span.far, span.columns) for tile in self.tiles for span in tile.spans]
        return spans == [(False, slice(0, self.keys))] and self.near_start == 0

    def groups(self, q: Tensor) -> Iterator[Group]:
        """Whole batch rows while they fit into a tile, else heads of one row."""
        batch, heads = q.shape[0], q.shape[1] // self.repeat
        budget = TILE_BYTES if on_cpu(q) else DEVICE_TILE_BYTES
        rows = min(self.rows, self.queries) * self.repeat
        width = max((tile.width for tile in self.tiles), default=0)
        many = max(1, budget // max(1, rows * width * q.element_size()))
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
        return Group(batch, heads, _narrow(self.seen, batch, queries))

    @cached_property
    def tiles(self) -> tuple[Tile, ...]:
        """The tiles of a group, rows upwards."""
        tiles = []
        for start in range(0, self.queries, self.rows):
            rows = slice(start, min(start + self.rows, self.queries))
            spans = self._aligned(rows) if self.aligned else self._whole()
            tiles.append(Tile(rows, tuple(span for span in spans if span.start < span.stop)))
        return tuple(tiles)

    def _whole(self) -> Iterator[Span]:
        """Every column: masks say what is seen."""
        if self.window is not None and not self.near_only:
            yield Span(far=True, start=0, stop=self.keys)
        yield Span(far=False, start=self.near_start, stop=self.keys)

    def _aligned(self, rows: slice) -> Iterator[Span]:
        """The columns that a row among `rows` sees, with the bounds on i − j."""
        first = rows.start + self.keys - self.queries
        last = rows.stop + self.keys - self.queries - 1
        sliding, kept = self.seen.window, self.seen.kept
        lowest = 0 if self.seen.causal else None
        if sliding is None:
            yield from self._regimes((0, self.keys), first, last, lowest, None)
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
        if not self.near_only:
            end = min(stop, last - self.window + 1)
            low = self.window if lowest is None else max(lowest, self.window)
            yield Span(True, start, end, low, highest)
        high = self.window - 1 if highest is None else min(highest, self.window - 1)
        begin = max(start, first - self.window + 1)
        yield Span(False, begin, stop, lowest, high)


def _rows(q: Tensor, near_only: bool) -> int:
    if not on_cpu(q):
        return DEVICE_ROWS
    if q.element_size() == 2:
        return HALF_ROWS
    return min(NEAR_ROWS, ROWS) if near_only else ROWS


def _narrow(seen: Visibility, batch: slice, heads: slice) -> Visibility:
    """The same visibility for a part of the batch and of the query heads."""

    def rows(x: Tensor | None) -> Tensor | None:
        return x[batch] if x is not None and x.dim() >= 2 and x.shape[0] > 1 else x

    mask = seen.mask
    if mask is not None:
        if mask.dim() >= 3 and mask.shape[-3] > 1:
            mask = mask[..., heads, :, :]
        if mask.dim() == 4 and mask.shape[0] > 1:
            mask = mask[batch]
    query, key = rows(seen.query), rows(seen.key)
    assert query is not None
    assert key is not None
    return replace(
        seen,
        query=query,
        key=key,
        padding=rows(seen.padding),
        mask=mask,
        query_documents=rows(seen.query_documents),
        key_documents=rows(seen.key_documents),
    )


def hide_edges(score: Tensor, tile: Tile, shift: int) -> None:
    """−∞ where i − j leaves a span's bounds: a corner of its columns, alike in most tiles.

    `score` is (…, c, r, width); `shift` is S − T.
    """
    first, last = tile.rows.start + shift, tile.rows.stop + shift - 1
    count = last - first + 1
    for span, at in tile.laid():
        if span.lowest is not None:
            begin = max(span.start, first - span.lowest + 1)
            if begin < span.stop:
                corner = _corner(
                    (count, span.stop - begin), first - span.lowest - begin + 1, True, score.device
                )
                _hide(score[..., at.stop - (span.stop - begin) : at.stop], corner)
        if span.highest is not None:
            end = min(span.stop, last - span.highest)
            if end > span.start:
                corner = _corner(
                    (count, end - span.start),
                    first - span.highest - span.start - 1,
                    False,
                    score.device,
                )
                _hide(score[..., at.start : at.start + end - span.start], corner)


def _hide(score: Tensor, corner: Tensor) -> None:
    score.masked_fill_(corner[:, None], -torch.inf)


@lru_cache(maxsize=256)
def _corner(shape: tuple[int, int], diagonal: int, upper: bool, device: torch.device) -> Tensor:
    """True on and above, or on and below, a diagonal."""
    with torch.inference_mode(False):
        ones = torch.ones(shape, dtype=torch.bool, device=device)
        return ones.triu(diagonal) if upper else ones.tril(diagonal)


def forget_corners() -> None:
    """Make them anew when they are next asked for."""
    _corner.cache_clear()
