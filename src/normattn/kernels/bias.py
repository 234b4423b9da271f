"""Attention with a bias by distance, tile by tile: no T × S matrix, O(S) numbers of bias.

score(i, j) = ⟨q_i, k_j⟩ + b(h, |i − j|)

Seen from the last query to the first, the bias of a tile is a Hankel matrix: entry (u, j) depends
on u + j alone, so it is a strided view of one line of b, both strides positive. The gradient of b
is the sums of the score gradient's antidiagonals: with a zero margin to its right, a view whose
rows start one entry earlier each puts every antidiagonal into a column. Backward computes a tile's
weights once more instead of keeping them. Half-precision inputs are widened to float32.

Where the bias falls so far that no score can make up for it, a weight is below the normal numbers
of the tensors' type, which count as 0 here: by Cauchy and Schwarz it is at most
exp(2 max|q| max|k| + b(d) − b(0)). A head's keys beyond that distance, its reach, are left out,
which is most of them in ALiBi's steep heads.

Legend: B batch, H heads, T queries, S keys, D score size, E value size, R distances; n heads and r
rows of a tile, w its columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from normattn.kernels.inputs import AttentionInputs, AttentionMask
from normattn.kernels.numerics import flushing, readable, refuse_second_derivative
from normattn.kernels.stats import Eye, Looked

# Query rows of a tile, and the bytes of its scores: about what a core's second cache holds.
ROWS, TILE_BYTES = 128, 2**20
# Keys from which on it is asked how far a head reaches.
REACH_FROM = 512


@dataclass(frozen=True)
class _Tile:
    """Rows of heads `flat` of (B·H, …), which are heads `heads` of `copies` batch rows.

    Its keys are `columns`; the bias of its last row and first key is at `offset` of the line.
    """

    flat: slice
    heads: slice
    copies: int
    rows: slice
    columns: slice
    offset: int

    @property
    def count(self) -> int:
        """r."""
        return int(self.rows.stop - self.rows.start)

    @property
    def width(self) -> int:
        """w."""
        return int(self.columns.stop - self.columns.start)

    @property
    def queries(self) -> tuple[slice, slice]:
        """Where the tile's queries are in (B·H, T, …)."""
        return self.flat, self.rows

    @property
    def keys(self) -> tuple[slice, slice]:
        """Where the tile's keys are in (B·H, S, …)."""
        return self.flat, self.columns

    def room(self, scratch: Tensor, margin: int) -> Tensor:
        """The part of `scratch` for this tile, (n, r, w + margin)."""
        shape = self.flat.stop - self.flat.start, self.count, self.width + margin
        return scratch[: math.prod(shape)].view(shape)


@dataclass(frozen=True)
class _Layout:
    """How some inputs fall into tiles."""

    batch: int
    heads: int
    queries: int
    keys: int
    causal: bool
    rows: int
    tile_bytes: int
    reach: tuple[int, ...]

    @staticmethod
    def of(q: Tensor, k: Tensor, bias: Tensor, causal: bool) -> _Layout:
        """By the shapes, and on a CPU by how far each head's weights are not 0."""
        keys = k.shape[2]
        batch, heads, queries, _ = q.shape
        return _Layout(
            batch,
            heads,
            queries,
            keys,
            causal,
            max(1, min(ROWS, queries)),
            TILE_BYTES,
            _reach(q, k, bias),
        )

    def tiles(self, itemsize: int) -> Iterator[_Tile]:
        """All tiles; those of the same heads have ever more keys where causal."""
        shift = self.keys - self.queries
        for flat, heads, copies in self._groups(itemsize):
            reach = max(self.reach[heads])
            for start in range(0, self.queries, self.rows):
                stop = min(start + self.rows, self.queries)
                first = max(0, start + shift - reach + 1)
                last = stop + shift if self.causal else min(self.keys, stop + shift + reach - 1)
                rows, columns = slice(start, stop), slice(first, last)
                yield _Tile(flat, heads, copies, rows, columns, self.queries - stop + first)

    def _groups(self, itemsize: int) -> Iterator[tuple[slice, slice, int]]:
        """Whole batch rows while they fit into a tile, else heads of one row."""
        many = max(1, self.tile_bytes // max(1, self.rows * self.keys * itemsize))
        if many >= self.heads:
            step = many // self.heads
            for start in range(0, self.batch, step):
                stop = min(start + step, self.batch)
                yield slice(start * self.heads, stop * self.heads), slice(None), stop - start
            return
        for row in range(0, self.batch * self.heads, self.heads):
            for start in range(0, self.heads, many):
                stop = min(start + many, self.heads)
                yield slice(row + start, row + stop), slice(start, stop), 1

    def line(self, bias: Tensor, dtype: torch.dtype) -> Tensor:
        """b of distance S − 1 … 0, then of keys after the query, −∞ where causal: (H, ·)."""
        back = bias[:, : self.keys].flip(-1)
        if self.causal:
            ahead = bias.new_full((self.heads, self.rows), -torch.inf)
        else:
            ahead = bias[:, 1 : self.keys]
        return torch.cat((back, ahead), -1).to(dtype)

    def scratch(self, like: Tensor, margin: int) -> Tensor:
        """Room for the scores of the largest tile."""
        tiles = self.tiles(like.element_size())
        heads = max((tile.flat.stop - tile.flat.start for tile in tiles), default=0)
        return like.new_empty(heads * self.rows * (self.keys + margin))

    def unlined(self, line: Tensor, distances: int) -> Tensor:
        """The gradient of b (H, R) from that of its line."""
        grad = line.new_zeros(self.heads, distances)
        grad[:, : self.keys] = line[:, : self.keys].flip(-1)
        if not self.causal:
            grad[:, 1 : self.keys] += line[:, self.keys : 2 * self.keys - 1]
        return grad


def _reach(q: Tensor, k: Tensor, bias: Tensor) -> tuple[int, ...]:
    """For each head a distance from which on every weight is below the normal numbers of q."""
    keys = k.shape[2]
    everything = (keys,) * q.shape[1]
    # Elsewhere the host would have to wait for the answer; a few rows are not worth the question.
    if not readable(q) or keys < REACH_FROM:
        return everything
    least = math.log(torch.finfo(q.dtype).smallest_normal)
    fall = bias.detach()[:, :keys] - bias.detach()[:, :1]
    if fall.amin() >= least:
        return everything
    longest = [torch.linalg.vector_norm(x, dim=-1).amax((0, 2)) for x in (q, k)]
    most = fall + 2 * (longest[0] * longest[1])[:, None]
    unseen = (most < least).flip(-1).to(torch.uint8)
    # How many distances at the end are all below.
    beyond = unseen.cumprod(-1).sum(-1)
    return tuple(keys - n for n in beyond.tolist())


def _hankel(line: Tensor, tile: _Tile) -> Tensor:
    """The bias of a tile, (copies, n, r, w), the last query first: a view."""
    part = line[tile.heads]
    shape = tile.copies, part.shape[0], tile.count, tile.width
    return part.as_strided(shape, (0, line.stride(0), 1, 1), part.storage_offset() + tile.offset)


def _weights(
    weight: Tensor, q: Tensor, k: Tensor, line: Tensor, tile: _Tile, into: Tensor | None = None
) -> Tensor:
    """The weights of a tile, (n, r, w and a margin of 0), written into `weight`.

    `q` are the tile's queries, the last first. With `into` they go there, and the scores stay.
    """
    score = weight[..., : tile.width]
    bias = _hankel(line, tile)
    score.view(bias.shape).copy_(bias)
    score.baddbmm_(q, k[tile.keys].transpose(1, 2))
    weight[..., tile.width :] = -torch.inf
    return torch.softmax(weight, -1, out=weight if into is None else into)


def _show(eye: Eye, score: Tensor, weight: Tensor, seen: AttentionMask, tile: _Tile) -> None:
    """Let an eye read a tile, whose queries stand the last first."""

    def put(rooms: Tensor, values: Tensor) -> None:
        rooms.flatten(1, 2)[:, tile.flat, tile.rows] = values.flip(2)

    def first(weight: Tensor) -> Tensor | None:
        return weight[..., 0] if tile.columns.start == 0 else None

    def mean(weight: Tensor, function: Tensor) -> Tensor:
        table = function[seen.distance(tile.rows, tile.columns).abs()].flip(0)
        return (weight * table).sum(-1)

    eye.show(score, weight, Looked(tile.width, first, mean), put)


def _antidiagonals(by_score: Tensor, tile: _Tile) -> Tensor:
    """Sums over u + j of (n, r, w + r), 0 from w on, for each head: (n of one row, w + r − 1)."""
    heads, rows, columns = by_score.shape
    shape, strides = (heads, rows, tile.width + rows - 1), (rows * columns, columns - 1, 1)
    sums = by_score.as_strided(shape, strides).sum(1)
    return sums.view(tile.copies, heads // tile.copies, -1).sum(0)


def _flat(x: Tensor) -> Tensor:
    return x.flatten(0, 1)


class _Bias(torch.autograd.Function):
    @staticmethod
    @flushing
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor,
        seen: AttentionMask,
        eye: Eye | None,
    ) -> Tensor:
        layout = _Layout.of(q, k, bias, seen.causal)
        out = q.new_empty(*q.shape[:3], v.shape[-1])
        line, scratch = layout.line(bias, q.dtype), layout.scratch(q, 0)
        aside = None if eye is None else layout.scratch(q, 0)
        flat_q, flat_k, flat_v, flat_out = _flat(q), _flat(k), _flat(v), _flat(out)
        for tile in layout.tiles(q.element_size()):
            queries = flat_q[tile.queries].flip(1)
            score = tile.room(scratch, 0)
            into = None if aside is None else tile.room(aside, 0)
            weight = _weights(score, queries, flat_k, line, tile, into)
            if eye is not None:
                _show(eye, score, weight, seen, tile)
            flat_out[tile.queries] = (weight @ flat_v[tile.keys]).flip(1)
        ctx.save_for_backward(q, k, v, bias)
        ctx.layout = layout
        return out

    @staticmethod
    @flushing
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("the bias kernel", "backend='reference'")
        q, k, v, bias = ctx.saved_tensors
        layout: _Layout = ctx.layout
        learned = ctx.needs_input_grad[3]
        by_q = torch.empty_like(q, memory_format=torch.contiguous_format)
        by_k, by_v = q.new_zeros(k.shape), q.new_zeros(v.shape)
        line = layout.line(bias, q.dtype)
        by_line = torch.zeros_like(line)
        one, other = (layout.scratch(q, layout.rows if learned else 0) for _ in range(2))
        flat_q, flat_k, flat_v, grad = _flat(q), _flat(k), _flat(v), _flat(grads[0])
        for tile in layout.tiles(q.element_size()):
            margin = tile.count if learned else 0
            queries, by_out = flat_q[tile.queries].flip(1), grad[tile.queries].flip(1)
            weight = _weights(tile.room(one, margin), queries, flat_k, line, tile)
            by_score = tile.room(other, margin)
            torch.bmm(by_out, flat_v[tile.keys].transpose(1, 2), out=by_score[..., : tile.width])
            by_score[..., tile.width :] = 0
            torch._softmax_backward_data(by_score, weight, -1, q.dtype, grad_input=by_score)
            if learned:
                part = _antidiagonals(by_score, tile)
                by_line[tile.heads, tile.offset : tile.offset + part.shape[-1]] += part
            weight, by_score = weight[..., : tile.width], by_score[..., : tile.width]
            _flat(by_q)[tile.queries] = (by_score @ flat_k[tile.keys]).flip(1)
            _flat(by_k)[tile.keys].baddbmm_(by_score.transpose(1, 2), queries)
            _flat(by_v)[tile.keys].baddbmm_(weight.transpose(1, 2), by_out)
        by_bias = layout.unlined(by_line, bias.shape[1]).to(bias.dtype) if learned else None
        return by_q, by_k, by_v, by_bias, None, None


def bias_attention(inputs: AttentionInputs, eye: Eye | None = None) -> Float[Tensor, "b h t e"]:
    """softmax(⟨q_i, k_j⟩ + b(h, |i − j|)) · v by tiles of about 1 MiB of scores.

    Gradients reach the bias where it wants them. b must be finite at distance 0. `eye` looks on,
    and changes nothing.
    """
    p = inputs.widened().expanded()
    out: Tensor = _Bias.apply(p.q, p.k, p.v, p.bias, p.visibility, eye)  # type: ignore[no-untyped-call]
    return out.to(inputs.v.dtype)
