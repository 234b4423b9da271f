"""Rotary tables: cos and sin of positions with λ folded in, cached for consecutive positions.

Legend: B batch, H heads, T queries or tokens, S keys, D head dimension, P rotated pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from normattn.errors import InputError
from normattn.kernels.numerics import at_least_float32
from normattn.plain import cacheable, traced, use_plain_ops
from normattn.score.parts import RotaryPosition, rope_frequencies
from normattn.score.positions import Positions
from normattn.score.spec import ScoreSpec

RotationArguments = tuple[Tensor, Tensor, Tensor, bool, int]
"""The fields of a `Rotation`: cos, sin, unrotated, interleaved, start."""
NormAfter = Callable[[Tensor], Tensor] | None
"""The norm of a score that normalises after the rotation; else None."""


@dataclass(frozen=True)
class Rotation:
    """Tables of cos and sin, each (T, P) or (B, 1, T, P), already multiplied by a scale.

    The 2·P features from `start` on rotate; `unrotated`, (T, 1) or (B, 1, T, 1), scales the rest.
    """

    cos: Float[Tensor, "*b t p"]
    sin: Float[Tensor, "*b t p"]
    unrotated: Float[Tensor, "*b t 1"]
    interleaved: bool
    start: int = 0

    def __call__(self, x: Float[Tensor, "b h t d"], norm: NormAfter = None) -> Tensor:
        """Rotate pair (a, b) to (a·cos − b·sin, b·cos + a·sin)."""
        rotate = _rotate_with_plain_ops if use_plain_ops() else _Rotate.apply
        y: Tensor = rotate(x, *self.arguments)
        return y if norm is None else norm(y)

    @property
    def arguments(self) -> RotationArguments:
        """The arguments of `rotate_rows` and `rotate_with_gradient` after the tensor."""
        return self.cos, self.sin, self.unrotated, self.interleaved, self.start

    def select(self, rows: slice) -> Rotation:
        """Select some of the positions."""
        cos, sin, unrotated = (x[..., rows, :] for x in (self.cos, self.sin, self.unrotated))
        return Rotation(cos, sin, unrotated, self.interleaved, self.start)


@dataclass(frozen=True)
class ChunkedRotation:
    """The rotation of Dual Chunk Attention, for the query rows of chunk `block`.

    Relative positions follow three rules: for keys in the rows' own chunk, in the chunk before, and
    further away. Queries are rotated by each rule, side by side. Keys are rotated once and placed
    in the slot of their rule, with 0 in the others, so that the product uses one rule. `chunk`,
    (S, 1) or (B, 1, S, 1), is the chunk of each key; None for queries. Rows of the first chunks
    have no slots for rules that do not occur.
    """

    rotations: tuple[Rotation, ...]
    chunk: Int[Tensor, "*b s 1"] | None = None
    block: int = 0

    def __call__(self, x: Float[Tensor, "b h t d"], norm: NormAfter = None) -> Tensor:
        """Rotate queries or keys: (B, H, T, rules·D)."""
        rules = min(max(self.block, 0) + 1, 3)
        if self.chunk is None:
            return torch.cat([rotation(x, norm) for rotation in self.rotations[:rules]], -1)
        y, rule = self.rotations[0](x, norm), (self.block - self.chunk).clamp(0, rules - 1)
        return torch.cat([torch.where(rule == n, y, 0.0) for n in range(rules)], -1)

    def select(self, rows: slice) -> ChunkedRotation:
        """Select some of the positions."""
        chunk = None if self.chunk is None else self.chunk[..., rows, :]
        return ChunkedRotation(tuple(x.select(rows) for x in self.rotations), chunk, self.block)


@dataclass(frozen=True)
class RotaryTables:
    """The rotations of queries or keys to their near and far positions, and λ.

    `far` is None without a second regime. `near` may be a chunked rotation. λ is folded into the
    rotations of queries. It is a separate `scale`, a number or broadcastable to (B, H, T, 1), if
    nothing rotates, if the norm follows the rotation, or if each head has its own λ.
    """

    near: Rotation | ChunkedRotation | None = None
    far: Rotation | None = None
    scale: Tensor | float | None = None

    def select(self, rows: slice) -> RotaryTables:
        """Select some of the positions."""
        near = None if self.near is None else self.near.select(rows)
        far = None if self.far is None else self.far.select(rows)
        scale = self.scale
        if isinstance(scale, Tensor) and scale.shape[-2] > 1:
            scale = scale[..., rows, :]
        return RotaryTables(near, far, scale)

    def select_block(self, block: int) -> RotaryTables:
        """The tables for the query rows of a block."""
        if not isinstance(self.near, ChunkedRotation):
            return self
        return replace(self, near=replace(self.near, block=block))


@dataclass(frozen=True, eq=False)
class Rotator:
    """Makes the rotations to any positions.

    Attributes:
        theta: θ_m of each pair (P,), in float64.
        interleaved: features 2m and 2m + 1 are a pair, instead of m and m + P.
        growth: ln of the factor by which each pair grows per position (XPos).
        start: the first of the 2·P features that rotate.
    """

    theta: Float[Tensor, " p"]
    interleaved: bool
    growth: Float[Tensor, " p"] | None = None
    start: int = 0

    def at(
        self, positions: Tensor, dtype: torch.dtype, scale: Tensor | float = 1.0, sign: int = 1
    ) -> Rotation:
        """Make the rotation to positions (T,) or (B, T), times `scale`, with angles in float64.

        Keys use `sign` −1: they shrink where queries grow.
        """
        positions = positions.double()
        if isinstance(scale, Tensor):
            scale = scale.double()[..., None]
        angle = positions[..., None] * self.theta.to(positions.device)
        unrotated = torch.ones_like(positions)[..., None] * scale
        if self.growth is not None:
            exponent = positions[..., None] * (self.growth * sign).to(positions.device)
            _check_overflow(exponent, self.growth, dtype)
            scale = exponent.exp() * scale
        table_dtype = at_least_float32(dtype)
        tables = angle.cos() * scale, angle.sin() * scale, unrotated
        cos, sin, unrotated = (add_head_axis(x, 3).to(table_dtype) for x in tables)
        return Rotation(cos, sin, unrotated, self.interleaved, self.start)


def add_head_axis(x: Tensor, batched_dim: int = 2) -> Tensor:
    """Insert an axis for heads after the batch axis, which x has if it has `batched_dim` axes.

    λ or n of queries, (T,), (B, T) or (B, H, T), becomes broadcastable to (B, H, T).
    """
    return x[:, None] if x.dim() == batched_dim else x


def scale_column(scale: Tensor | float) -> Tensor | float:
    """λ, a number or of the shape of n, as a factor of (B, H, T, D)."""
    return add_head_axis(scale)[..., None] if isinstance(scale, Tensor) else scale


def scaled(q: Float[Tensor, "b h t d"], scale: Tensor | float | None) -> Float[Tensor, "b h t d"]:
    """q · scale, multiplied in float32 or wider: a scale rounded to half would bias a whole row."""
    if not isinstance(scale, Tensor):
        return q if scale is None else q * scale
    dtype = at_least_float32(q.dtype)
    return (q.to(dtype) * scale.to(dtype)).to(q.dtype)


def query_scale(spec: ScoreSpec, head_dim: int, n: Int[Tensor, "*bn u"]) -> Tensor | float:
    """λ(i): a number, or a float64 tensor of the shape of n, the number of visible keys."""
    length, variant, logn = spec.train_length, spec.variant, spec.logn
    gain = 1.0 if spec.rope_scaling is None else spec.rope_scaling.gain(length)
    if logn is None:
        return variant.base(head_dim, length) * gain
    n = n.double()
    if variant.logn_replaces_base and logn.replaces_base:
        return variant.base_at(n) * gain
    return logn.factor(n, length) * (variant.base(head_dim, length) * gain)


def frequencies(spec: ScoreSpec, head_dim: int) -> Float[Tensor, " p"]:
    """θ'_m of the pairs that rotate, in float64; empty without rotary position."""
    position, scaling = spec.position, spec.rope_scaling
    if not isinstance(position, RotaryPosition):
        return torch.empty(0, dtype=torch.float64, device="cpu")
    rotary_dim, base = position.rotary_dim(head_dim), position.base
    if scaling is None:
        return position.adjusted(rope_frequencies(rotary_dim, base))
    return position.adjusted(scaling.inverse_frequencies(rotary_dim, base, spec.train_length))


def _make_rotator(spec: ScoreSpec, head_dim: int) -> Rotator | None:
    """The rotator of a score; None without rotary position. The scaling's gain is part of λ."""
    position = spec.position
    if not isinstance(position, RotaryPosition):
        return None
    return Rotator(
        frequencies(spec, head_dim),
        interleaved=position.layout == "interleaved",
        growth=position.log_growth(head_dim),
        start=position.rotary_start(head_dim),
    )


def query_tables(
    spec: ScoreSpec, head_dim: int, positions: Positions, dtype: torch.dtype
) -> RotaryTables:
    """Rotary tables of queries at these positions, with λ."""
    if not positions.regular or positions.masked or not cacheable():
        return _make_query_tables(spec, head_dim, positions.query, positions.n, dtype)
    queries, keys = positions.query.shape[-1], positions.key.shape[-1]
    # Without causality λ may depend on the number of keys; other tables suit every length.
    visible = None if positions.causal or spec.logn is None else keys
    first = max(0, keys - queries)
    length = _table_length(spec, head_dim, dtype, first + queries)
    tables = _cached_query_tables(spec, head_dim, dtype, length, positions.query.device, visible)
    return tables.select(slice(first, first + queries))


def key_tables(
    spec: ScoreSpec,
    head_dim: int,
    positions: Int[Tensor, "*bk s"],
    dtype: torch.dtype,
    first: int | None = None,
    far_to_near: bool = False,
) -> RotaryTables:
    """Rotary tables of keys at these positions; consecutive ones from `first` on if it is given.

    With `far_to_near`, `near` rotates keys from their far to their near positions.
    """
    if first is None or not cacheable():
        return _make_key_tables(spec, head_dim, positions, dtype, far_to_near)
    stop = first + positions.shape[-1]
    length = _table_length(spec, head_dim, dtype, stop)
    tables = _cached_key_tables(spec, head_dim, dtype, length, positions.device, far_to_near)
    return tables.select(slice(first, stop))


def _make_query_tables(
    spec: ScoreSpec, head_dim: int, positions: Tensor, n: Tensor, dtype: torch.dtype
) -> RotaryTables:
    scale, rotator = query_scale(spec, head_dim, n), _make_rotator(spec, head_dim)
    if rotator is None:
        return RotaryTables(scale=scale_column(scale))
    # Rotations have no head axis, but n has one if each head has its own mask.
    folded = spec.order is None and n.dim() < 3
    positions, rotation_scale = positions.double(), scale if folded else 1.0
    separate_scale = None if folded else scale_column(scale)
    if spec.chunk_remapping is not None:
        by_rule = spec.chunk_remapping.query_positions(positions)
        near = ChunkedRotation(tuple(rotator.at(x, dtype, rotation_scale) for x in by_rule))
        return RotaryTables(near, scale=separate_scale)
    far = None
    if spec.remapping is not None:
        far_positions = spec.remapping.far_positions(positions, positions)[0]
        far = rotator.at(far_positions, dtype, rotation_scale)
    return RotaryTables(rotator.at(positions, dtype, rotation_scale), far, separate_scale)


def _make_key_tables(
    spec: ScoreSpec, head_dim: int, positions: Tensor, dtype: torch.dtype, far_to_near: bool
) -> RotaryTables:
    rotator, near, chunks = _make_rotator(spec, head_dim), positions.double(), spec.chunk_remapping
    if rotator is None:
        return RotaryTables()
    if chunks is not None:
        chunk = positions.div(chunks.required("size"), rounding_mode="floor").long()
        rotation = rotator.at(chunks.key_positions(near), dtype, sign=-1)
        return RotaryTables(ChunkedRotation((rotation,), add_head_axis(chunk[..., None], 3)))
    if spec.remapping is None:
        return RotaryTables(rotator.at(near, dtype, sign=-1))
    far = spec.remapping.far_positions(near, near)[1]
    if far_to_near:
        return RotaryTables(rotator.at(near - far, dtype, sign=-1))
    return RotaryTables(rotator.at(near, dtype, sign=-1), rotator.at(far, dtype, sign=-1))


# Cached tables of positions 0 … length − 1, from which calls select rows: a sequence that grows
# token by token seldom needs new ones. They are not inference tensors, since training uses them.


@lru_cache(maxsize=32)
@torch.inference_mode(False)
def _cached_query_tables(
    spec: ScoreSpec,
    head_dim: int,
    dtype: torch.dtype,
    length: int,
    device: torch.device,
    visible: int | None,
) -> RotaryTables:
    """Tables for n = i + 1 visible keys of query i, or n = `visible` for all queries."""
    query = torch.arange(length, device=device)
    n = query + 1 if visible is None else torch.tensor([visible], device=device)
    return _make_query_tables(spec, head_dim, query, n, dtype)


@lru_cache(maxsize=32)
@torch.inference_mode(False)
def _cached_key_tables(
    spec: ScoreSpec,
    head_dim: int,
    dtype: torch.dtype,
    length: int,
    device: torch.device,
    far_to_near: bool,
) -> RotaryTables:
    positions = torch.arange(length, device=device)
    return _make_key_tables(spec, head_dim, positions, dtype, far_to_near)


def _table_length(spec: ScoreSpec, head_dim: int, dtype: torch.dtype, positions: int) -> int:
    """The length of cached tables: the next power of two, or where growing features overflow."""
    length, position = max(64, 1 << (positions - 1).bit_length()), spec.position
    growth = position.log_growth(head_dim) if isinstance(position, RotaryPosition) else None
    if growth is None:
        return length
    return max(positions, min(length, _max_position(growth, dtype) + 1))


def _max_position(log_growth: Float[Tensor, "p"], dtype: torch.dtype) -> int:
    """The last position at which growing features stay well within the dtype's range."""
    range_of_dtype = math.log(torch.finfo(dtype).max) / 2
    fastest = float(log_growth.abs().max())
    return int(range_of_dtype / fastest) if fastest else 2**62


def _check_overflow(exponent: Tensor, log_growth: Tensor, dtype: torch.dtype) -> None:
    """Raise `InputError` if features exceed the dtype's range; unchecked while tracing."""
    if traced() or exponent.is_meta or not exponent.numel():
        return
    last = _max_position(log_growth, dtype)
    if float(exponent.abs().max()) > (last + 0.5) * float(log_growth.abs().max()):
        raise InputError(
            f"XPos in {dtype} works up to position {last}: beyond it a query shrinks and a key "
            "grows out of the dtype's range; use a larger scale or a wider dtype"
        )


def feature_pairs(start: int, count: int, interleaved: bool) -> tuple[slice, slice]:
    """The first and the second features of all pairs that rotate."""
    end = start + 2 * count
    if interleaved:
        return slice(start, end, 2), slice(start + 1, end, 2)
    return slice(start, start + count), slice(start + count, end)


# For eager calls: a compiler traces the function itself.
cached_feature_pairs = lru_cache(maxsize=256)(feature_pairs)


def rotate_rows(
    x: Tensor, cos: Tensor, sin: Tensor, unrotated: Tensor, interleaved: bool, start: int
) -> Tensor:
    """Rotate pair (a, b) of x to (a·cos − b·sin, b·cos + a·sin), without a gradient."""
    dtype, x = x.dtype, x if x.dtype == cos.dtype else x.to(cos.dtype)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    first, second = cached_feature_pairs(start, cos.shape[-1], interleaved)
    a, b, rotated_a, rotated_b = x[..., first], x[..., second], y[..., first], y[..., second]
    end = start + 2 * cos.shape[-1]
    if start > 0:
        torch.mul(x[..., :start], unrotated, out=y[..., :start])
    if end < x.shape[-1]:
        torch.mul(x[..., end:], unrotated, out=y[..., end:])
    torch.mul(a, cos, out=rotated_a)
    rotated_a.addcmul_(b, sin, value=-1)
    torch.mul(b, cos, out=rotated_b)
    rotated_b.addcmul_(a, sin)
    return y.to(dtype)


def _rotate_with_plain_ops(
    x: Tensor, cos: Tensor, sin: Tensor, unrotated: Tensor, interleaved: bool, start: int
) -> Tensor:
    """`rotate_rows` in operations that a compiler can fuse."""
    dtype, x, end = x.dtype, x.to(cos.dtype), start + 2 * cos.shape[-1]
    first, second = feature_pairs(start, cos.shape[-1], interleaved)
    a, b = x[..., first], x[..., second]
    rotated = a * cos - b * sin, b * cos + a * sin
    y = torch.stack(rotated, -1).flatten(-2) if interleaved else torch.cat(rotated, -1)
    if end - start < x.shape[-1]:
        y = torch.cat((x[..., :start] * unrotated, y, x[..., end:] * unrotated), -1)
    return y.to(dtype)


class _Rotate(torch.autograd.Function):
    """`rotate_rows` with its backward: the inverse rotation, times the same scale."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        unrotated: Tensor,
        interleaved: bool,
        start: int,
    ) -> Tensor:
        # Tables are constants, so they are not saved with `save_for_backward`.
        ctx.tables = cos, sin, unrotated, interleaved, start
        return rotate_rows(x, cos, sin, unrotated, interleaved, start)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin, *settings = ctx.tables
        # With gradients enabled, this backward is differentiated: by a rotation again.
        rotate = _Rotate.apply if torch.is_grad_enabled() else rotate_rows
        rotate = _rotate_with_plain_ops if use_plain_ops() else rotate
        return rotate(grad, cos, -sin, *settings), None, None, None, None, None


rotate_with_gradient: Any = super(torch.autograd.Function, _Rotate).apply
"""`rotate_rows` with a gradient, without `apply`'s slow checks for torch.func."""
