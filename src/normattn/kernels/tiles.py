"""A tile: some query rows of some heads, small enough for the cache, and its scores.

In two regimes a tile multiplies only the keys that it needs of each: the near columns start at
the window, the far ones end before it, so together they are about the pairs of one causal
attention.

Legend: B batch, H heads, T queries, S keys, D score size; b, h, c a tile's batch rows, heads,
query rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from normattn.kernels.problem import Visibility

# Scores of one tile, in bytes: about the second-level cache of a core.
TILE_BYTES = 2**20
# Query rows of a tile. Fewer rows waste fewer hidden pairs; half-precision products want more.
ROWS = 64
HALF_ROWS = 128
# On a GPU a tile must fill the device instead.
DEVICE_TILE_BYTES, DEVICE_ROWS = 2**28, 256


@dataclass(frozen=True)
class Regimes:
    """The near queries and keys, and where there is a window, the far ones."""

    q: Tensor
    k: Tensor
    far_q: Tensor | None = None
    far_k: Tensor | None = None
    window: int | None = None


@dataclass(frozen=True)
class Tile:
    """Slices of batch, heads and rows; the columns end at `end`, far ones at `far_end`.

    The near columns begin at `near_start`. `seen` says who may see whom in this part of the batch.
    """

    batch: slice
    heads: slice
    rows: slice
    end: int
    far_end: int
    near_start: int
    seen: Visibility

    @property
    def queries(self) -> tuple[slice, slice, slice]:
        """Where the tile's queries are in (B, H, T, …)."""
        return self.batch, self.heads, self.rows

    def keys(self, start: int, end: int) -> tuple[slice, slice, slice]:
        """Where keys `start` … `end` of the tile's heads are in (B, H, S, …)."""
        return self.batch, self.heads, slice(start, end)


def tiles(q: Tensor, keys: int, window: int | None, visibility: Visibility) -> Iterator[Tile]:
    """Every tile of the problem, group of heads by group of heads."""
    shift = keys - q.shape[2]
    rows = _rows(q)
    for batch, heads in _groups(q, rows, keys):
        seen = _narrow(visibility, batch, heads)
        for start in range(0, q.shape[2], rows):
            stop = min(start + rows, q.shape[2])
            where = batch, heads, slice(start, stop)
            if not (visibility.aligned and visibility.causal):
                yield Tile(*where, keys, 0 if window is None else keys, 0, seen)
            elif window is None:
                yield Tile(*where, stop + shift, 0, 0, seen)
            else:
                far_end = max(0, stop + shift - window)
                near_start = max(0, start + shift - window + 1)
                yield Tile(*where, stop + shift, far_end, near_start, seen)


def _rows(q: Tensor) -> int:
    if q.device.type != "cpu":
        return DEVICE_ROWS
    return HALF_ROWS if q.element_size() == 2 else ROWS


def _groups(q: Tensor, rows: int, keys: int) -> Iterator[tuple[slice, slice]]:
    """Whole batch rows while they fit into a tile, else heads of one row."""
    batch, heads = q.shape[:2]
    budget = TILE_BYTES if q.device.type == "cpu" else DEVICE_TILE_BYTES
    one = min(rows, q.shape[2]) * keys * q.element_size()
    many = max(1, budget // max(1, one))
    if many >= heads:
        step = many // heads
        for start in range(0, batch, step):
            yield slice(start, min(start + step, batch)), slice(0, heads)
        return
    for row in range(batch):
        for start in range(0, heads, many):
            yield slice(row, row + 1), slice(start, min(start + many, heads))


def _narrow(visibility: Visibility, batch: slice, heads: slice) -> Visibility:
    """The same visibility for a part of the batch and of the heads."""

    def rows(x: Tensor) -> Tensor:
        return x[batch] if x.dim() == 2 and x.shape[0] > 1 else x

    mask = visibility.mask
    if mask is not None:
        if mask.dim() >= 3 and mask.shape[-3] > 1:
            mask = mask[..., heads, :, :]
        if mask.dim() == 4 and mask.shape[0] > 1:
            mask = mask[batch]
    padding = None if visibility.padding is None else visibility.padding[batch]
    return replace(
        visibility,
        query=rows(visibility.query),
        key=rows(visibility.key),
        padding=padding,
        mask=mask,
    )


@lru_cache(maxsize=16)
def _upper(rows: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.ones(rows, rows, dtype=torch.bool, device=device).triu(1)


def weights(regimes: Regimes, tile: Tile) -> Tensor:
    """softmax of the tile's scores, (b, h, c, end); 0 for a query that sees no key."""
    score = _scores(regimes, tile)
    if tile.seen.plain:
        if tile.seen.causal:
            rows = tile.rows.stop - tile.rows.start
            score[..., tile.end - rows :].masked_fill_(_upper(rows, score.device), -torch.inf)
        return torch.softmax(score, -1)
    every = slice(0, tile.end)
    added = tile.seen.added(tile.rows, every)
    if added is not None:
        score += added
    hidden = tile.seen.hidden(tile.rows, every)
    if hidden is not None:
        score.masked_fill_(hidden, -torch.inf)
    nothing = (score == -torch.inf).all(-1, keepdim=True)
    return torch.softmax(score, -1).masked_fill_(nothing, 0.0)


def _scores(regimes: Regimes, tile: Tile) -> Tensor:
    """⟨q, k⟩, or ⟨far q, far k⟩ where i − j ≥ window, of a tile."""
    near_keys = tile.keys(tile.near_start, tile.end)
    near = regimes.q[tile.queries] @ regimes.k[near_keys].transpose(-1, -2)
    if regimes.far_q is None or regimes.far_k is None or tile.far_end == 0:
        return near
    far = regimes.far_q[tile.queries] @ regimes.far_k[tile.keys(0, tile.far_end)].transpose(-1, -2)
    overlap = tile.far_end - tile.near_start
    if overlap > 0:
        is_far = distant(regimes, tile, slice(tile.near_start, tile.far_end))
        near[..., :overlap] = torch.where(is_far, far[..., tile.near_start :], near[..., :overlap])
    return torch.cat((far[..., : tile.near_start], near), -1)


def distant(regimes: Regimes, tile: Tile, columns: slice) -> Tensor:
    """Where i − j ≥ window among these columns."""
    assert regimes.window is not None
    return tile.seen.distance(tile.rows, columns) >= regimes.window
