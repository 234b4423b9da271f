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


def _make_rotator(
    spec: ScoreSpec, head_dim: int, dtype: torch.dtype
) -> Callable[..., Rotation] | None:
    """A function that makes the rotation to any positions; None without rotary position."""
    position = spec.position
    if not isinstance(position, RotaryPosition):
        return None
    theta, growth = frequencies(spec, head_dim), position.log_growth(head_dim)
    layout, start = position.layout, position.rotary_start(head_dim)

    def rotation_to(positions: Tensor, scale: Tensor | float = 1.0, sign: int = 1) -> Rotation:
        """The rotation to positions (T,) or (B, T), times `scale`, with angles in float64.

        Keys use `sign` −1: with XPos they shrink where queries grow. λ includes a scaling's gain.
        """
        positions = positions.double()
        if isinstance(scale, Tensor):
            scale = scale.double()[..., None]
        angle = positions[..., None] * theta.to(positions.device)
        unrotated = torch.ones_like(positions)[..., None] * scale
        if growth is not None:
            exponent = positions[..., None] * (growth * sign).to(positions.device)
            if not traced() and not exponent.is_meta and exponent.numel():
                last, fastest = _max_position(growth, dtype), float(growth.abs().max())
                if float(exponent.abs().max()) > (last + 0.5) * fastest:
                    raise InputError(
                        f"XPos in {dtype} works up to position {last}: beyond it a query shrinks "
                        "and a key grows out of the dtype's range; use a larger scale or a wider "
                        "dtype"
                    )
            scale = exponent.exp() * scale
        tables = angle.cos() * scale, angle.sin() * scale, unrotated
        cos, sin, unrotated = (add_head_axis(x, 3).to(at_least_float32(dtype)) for x in tables)
        return Rotation(cos, sin, unrotated, layout == "interleaved", start)

    return rotation_to


def query_tables(
    spec: ScoreSpec, head_dim: int, positions: Positions, dtype: torch.dtype
) -> RotaryTables:
    """Rotary tables of queries at these positions, with λ."""
    if not positions.regular or positions.masked or not cacheable():
        return _make_query_tables(positions.query, spec, head_dim, dtype, positions.n)
    queries, keys = positions.query.shape[-1], positions.key.shape[-1]
    # Without causality λ may depend on the number of keys; other tables suit every length.
    visible = None if positions.causal or spec.logn is None else keys
    rows, device = slice(max(0, keys - queries), max(queries, keys)), positions.query.device
    return _select_cached(rows, device, _make_query_tables, spec, head_dim, dtype, visible)


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
        return _make_key_tables(positions, spec, head_dim, dtype, far_to_near)
    rows, device = slice(first, first + positions.shape[-1]), positions.device
    return _select_cached(rows, device, _make_key_tables, spec, head_dim, dtype, far_to_near)


def _make_query_tables(
    positions: Tensor,
    spec: ScoreSpec,
    head_dim: int,
    dtype: torch.dtype,
    visible: Tensor | int | None,
) -> RotaryTables:
    """`visible` is the number of visible keys; None: causality gives it."""
    if visible is None:
        visible = positions + 1
    elif isinstance(visible, int):
        visible = torch.tensor([visible], device=positions.device)
    scale = query_scale(spec, head_dim, visible)
    rotation_to = _make_rotator(spec, head_dim, dtype)
    if rotation_to is None:
        return RotaryTables(scale=scale_column(scale))
    # Rotations have no head axis, but n has one if each head has its own mask.
    folded = spec.order is None and visible.dim() < 3
    positions, rotation_scale = positions.double(), scale if folded else 1.0
    separate_scale = None if folded else scale_column(scale)
    if spec.chunk_remapping is not None:
        by_rule = spec.chunk_remapping.query_positions(positions)
        near = ChunkedRotation(tuple(rotation_to(x, rotation_scale) for x in by_rule))
        return RotaryTables(near, scale=separate_scale)
    far = None
    if spec.remapping is not None:
        far_positions = spec.remapping.far_positions(positions, positions)[0]
        far = rotation_to(far_positions, rotation_scale)
    return RotaryTables(rotation_to(positions, rotation_scale), far, separate_scale)


def _make_key_tables(
    positions: Tensor, spec: ScoreSpec, head_dim: int, dtype: torch.dtype, far_to_near: bool
) -> RotaryTables:
    rotation_to, chunks = _make_rotator(spec, head_dim, dtype), spec.chunk_remapping
    near = positions.double()
    if rotation_to is None:
        return RotaryTables()
    if chunks is not None:
        chunk = positions.div(chunks.required("size"), rounding_mode="floor").long()
        rotation = rotation_to(chunks.key_positions(near), sign=-1)
        return RotaryTables(ChunkedRotation((rotation,), add_head_axis(chunk[..., None], 3)))
    if spec.remapping is None:
        return RotaryTables(rotation_to(near, sign=-1))
    far = spec.remapping.far_positions(near, near)[1]
    if far_to_near:
        return RotaryTables(rotation_to(near - far, sign=-1))
    return RotaryTables(rotation_to(near, sign=-1), rotation_to(far, sign=-1))


def _select_cached(rows: slice, device: torch.device, make: Any, *arguments: Any) -> RotaryTables:
    """Some rows of cached tables, whose length is a power of two: a sequence seldom outgrows it."""
    (spec, head_dim, dtype, _), length = arguments, max(64, 1 << (rows.stop - 1).bit_length())
    rotary = isinstance(spec.position, RotaryPosition)
    if rotary and (growth := spec.position.log_growth(head_dim)) is not None:
        length = max(rows.stop, min(length, _max_position(growth, dtype) + 1))
    return _cached_tables(length, device, make, *arguments).select(rows)


@lru_cache(maxsize=64)
@torch.inference_mode(False)
def _cached_tables(length: int, device: torch.device, make: Any, *arguments: Any) -> RotaryTables:
    """Tables of positions 0 … length − 1; no inference tensors, since training uses them."""
    tables: RotaryTables = make(torch.arange(length, device=device), *arguments)
    return tables


def _max_position(log_growth: Float[Tensor, "p"], dtype: torch.dtype) -> int:
    """The last position at which growing features stay well within the dtype's range."""
    range_of_dtype = math.log(torch.finfo(dtype).max) / 2
    fastest = float(log_growth.abs().max())
    return int(range_of_dtype / fastest) if fastest else 2**62


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
