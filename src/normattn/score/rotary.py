"""Rotary tables: cos and sin of positions with λ folded in, kept where positions simply count.

Legend: B batch, H heads, T queries or tokens, S keys, D head dimension, P pairs of features that
rotate.
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
"""cos, sin and rest of a `Rotation`, whether pairs are interleaved, and the first that rotates."""
NormAfter = Callable[[Tensor], Tensor] | None
"""The normalisation of rotated features, where it follows the rotation."""


@dataclass(frozen=True)
class Rotation:
    """Tables of cos and sin, each (T, P) or (B, 1, T, P), already multiplied by a scale.

    The 2·P features from `start` on rotate; the others do not: they are multiplied by `rest`,
    (T, 1) or (B, 1, T, 1).
    """

    cos: Float[Tensor, "*b t p"]
    sin: Float[Tensor, "*b t p"]
    rest: Float[Tensor, "*b t 1"]
    interleaved: bool
    start: int = 0

    def __call__(self, x: Float[Tensor, "b h t d"], norm: NormAfter = None) -> Tensor:
        """Rotate pair (a, b) to (a·cos − b·sin, b·cos + a·sin)."""
        rotate = _rotate_plainly if use_plain_ops() else _Rotate.apply
        y: Tensor = rotate(x, *self.arguments)
        return y if norm is None else norm(y)

    @property
    def arguments(self) -> RotationArguments:
        """What `rotate_rows` and `rotate_with_gradient` take behind the tensor."""
        return self.cos, self.sin, self.rest, self.interleaved, self.start

    def rows(self, rows: slice) -> Rotation:
        """The rotation of some of the positions."""
        cos, sin, rest = (x[..., rows, :] for x in (self.cos, self.sin, self.rest))
        return Rotation(cos, sin, rest, self.interleaved, self.start)


@dataclass(frozen=True)
class ChunkedRotation:
    """Features of three rules of position side by side, as the rows of chunk `block` read them.

    The rules are those of keys in the rows' own chunk, in the one before, and further away. Queries
    have a rotation for each rule. Keys have one: with `chunk`, (S, 1) or (B, 1, S, 1), that of each
    key, they are placed by their rule and 0 elsewhere, so that the product with queries is that of
    the rule. Rows of the first chunks have no keys of the last rules, and no features for them.
    """

    rotations: tuple[Rotation, ...]
    chunk: Int[Tensor, "*b s 1"] | None = None
    block: int = 0

    def __call__(self, x: Float[Tensor, "b h t d"], norm: NormAfter = None) -> Tensor:
        """Queries or keys, rotated and laid out by rule (B, H, T, rules·D)."""
        rules = min(max(self.block, 0) + 1, 3)
        if self.chunk is None:
            return torch.cat([rotation(x, norm) for rotation in self.rotations[:rules]], -1)
        y, rule = self.rotations[0](x, norm), (self.block - self.chunk).clamp(0, rules - 1)
        return torch.cat([torch.where(rule == n, y, 0.0) for n in range(rules)], -1)

    def rows(self, rows: slice) -> ChunkedRotation:
        """The rotations of some of the positions."""
        chunk = None if self.chunk is None else self.chunk[..., rows, :]
        return ChunkedRotation(tuple(r.rows(rows) for r in self.rotations), chunk, self.block)


@dataclass(frozen=True)
class RotaryTables:
    """Rotations of queries or keys to their near and their far positions.

    `far` is None where there is one regime, or nothing to do. λ is folded into the rotations of
    queries, or stays outside as `scale`, a number or broadcastable to (B, H, T, 1): where nothing
    rotates, where the normalisation follows the rotation, and where heads have a λ each. Where
    rules go by chunks `near` has all of them.
    """

    near: Rotation | ChunkedRotation | None = None
    far: Rotation | None = None
    scale: Tensor | float | None = None

    def rows(self, rows: slice) -> RotaryTables:
        """The tables of some of the positions."""
        near = None if self.near is None else self.near.rows(rows)
        far = None if self.far is None else self.far.rows(rows)
        scale = self.scale
        if isinstance(scale, Tensor) and scale.shape[-2] > 1:
            scale = scale[..., rows, :]
        return RotaryTables(near, far, scale)

    def select_block(self, block: int) -> RotaryTables:
        """The tables as the rows of a block read them."""
        if not isinstance(self.near, ChunkedRotation):
            return self
        return replace(self, near=replace(self.near, block=block))


@dataclass(frozen=True, eq=False)
class Rotator:
    """How pairs of features rotate with the position.

    Attributes:
        theta: θ_m of the pairs (P,), in float64.
        interleaved: whether features 2m and 2m + 1 are a pair, instead of m and m + P.
        growth: the logarithm by which each pair grows from position to position (XPos).
        amplitude: the factor of cos and sin; features that do not rotate keep their size.
        start: the first of the 2·P features that rotate.
    """

    theta: Float[Tensor, " p"]
    interleaved: bool
    growth: Float[Tensor, " p"] | None = None
    amplitude: float = 1.0
    start: int = 0

    def at(
        self, positions: Tensor, dtype: torch.dtype, scale: Tensor | float = 1.0, sign: int = 1
    ) -> Rotation:
        """Make the rotation to positions (T,) or (B, T), times `scale`, with angles in float64.

        Keys (sign −1) shrink what grows.
        """
        positions = positions.double()
        if isinstance(scale, Tensor):
            scale = scale.double()[..., None]
        angle = positions[..., None] * self.theta.to(positions.device)
        size = scale * self.amplitude
        if self.growth is not None:
            exponent = positions[..., None] * (self.growth * sign).to(positions.device)
            _refuse_overflow(exponent, self.growth, dtype)
            size = exponent.exp() * size
        rest = torch.ones_like(positions)[..., None] * scale
        table = at_least_float32(dtype)
        tables = angle.cos() * size, angle.sin() * size, rest
        cos, sin, rest = (by_head(x, 3).to(table) for x in tables)
        return Rotation(cos, sin, rest, self.interleaved, self.start)


def by_head(x: Tensor, batched: int = 2) -> Tensor:
    """x with an axis for heads behind that of the batch, which it has where it has `batched` axes.

    λ or n of queries, (T,), (B, T) or (B, H, T), becomes broadcastable to (B, H, T).
    """
    return x[:, None] if x.dim() == batched else x


def scale_column(scale: Tensor | float) -> Tensor | float:
    """λ of the shape of n as a factor of (B, H, T, D)."""
    return by_head(scale)[..., None] if isinstance(scale, Tensor) else scale


def scaled(q: Float[Tensor, "b h t d"], scale: Tensor | float | None) -> Float[Tensor, "b h t d"]:
    """q · scale, half precision rounded once: a rounded scale would be off for the whole row."""
    if not isinstance(scale, Tensor):
        return q if scale is None else q * scale
    wide = at_least_float32(q.dtype)
    return (q.to(wide) * scale.to(wide)).to(q.dtype)


def query_scale(spec: ScoreSpec, head_dim: int, n: Int[Tensor, "*bn u"]) -> Tensor | float:
    """λ(i), in float64: a number, or a tensor of the shape of n, the number of visible keys."""
    length, variant, logn = spec.train_length, spec.variant, spec.logn
    gain = 1.0 if spec.rope_scaling is None else spec.rope_scaling.gain(length)
    if logn is None:
        return variant.base(head_dim, length) * gain
    n = n.double()
    if variant.logn_replaces_base and logn.replaces_base:
        return variant.base_at(n) * gain
    return logn.factor(n, length) * (variant.base(head_dim, length) * gain)


def frequencies(spec: ScoreSpec, head_dim: int) -> Float[Tensor, " p"]:
    """θ'_m of the pairs that rotate, in float64; empty where nothing does."""
    position, scaling = spec.position, spec.rope_scaling
    if not isinstance(position, RotaryPosition):
        return torch.empty(0, dtype=torch.float64)
    size = position.rotary_dim(head_dim)
    if scaling is None:
        return position.adjusted(rope_frequencies(size, position.base))
    return position.adjusted(scaling.inverse_frequencies(size, position.base, spec.train_length))


def _rotator(spec: ScoreSpec, head_dim: int) -> Rotator | None:
    """Make the rotator of a score, or None where nothing rotates; the gain is in λ."""
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
    """Rotary tables of queries at these positions, λ included."""
    if not positions.regular or positions.masked or not cacheable():
        return _queries(spec, head_dim, positions.query, positions.n, dtype)
    queries, keys = positions.query.shape[-1], positions.key.shape[-1]
    # The number of visible keys counts where λ grows with it: other tables serve every length.
    visible = None if positions.causal or spec.logn is None else keys
    first = max(0, keys - queries)
    capacity = _capacity(spec, head_dim, dtype, first + queries)
    whole = _counted_queries(spec, head_dim, dtype, capacity, positions.query.device, visible)
    return whole.rows(slice(first, first + queries))


def key_tables(
    spec: ScoreSpec,
    head_dim: int,
    positions: Int[Tensor, "*bk s"],
    dtype: torch.dtype,
    first: int | None = None,
    far_to_near: bool = False,
) -> RotaryTables:
    """Rotary tables of keys at these positions, which count from `first` on where it is given.

    With `far_to_near` `near` rotates keys from their far to their near positions.
    """
    if first is None or not cacheable():
        return _keys(spec, head_dim, positions, dtype, far_to_near)
    last = first + positions.shape[-1]
    capacity = _capacity(spec, head_dim, dtype, last)
    whole = _counted_keys(spec, head_dim, dtype, capacity, positions.device, far_to_near)
    return whole.rows(slice(first, last))


def _queries(
    spec: ScoreSpec, head_dim: int, positions: Tensor, n: Tensor, dtype: torch.dtype
) -> RotaryTables:
    scale, rotator = query_scale(spec, head_dim, n), _rotator(spec, head_dim)
    if rotator is None:
        return RotaryTables(scale=scale_column(scale))
    # Rotations have no axis of heads, which n has where each head has a mask of its own.
    inside = spec.order is None and n.dim() < 3
    at, factor = positions.double(), scale if inside else 1.0
    outside = None if inside else scale_column(scale)
    if spec.chunk_remapping is not None:
        rules = spec.chunk_remapping.query_positions(at)
        near = ChunkedRotation(tuple(rotator.at(own, dtype, factor) for own in rules))
        return RotaryTables(near, scale=outside)
    far = None
    if spec.remapping is not None:
        far = rotator.at(spec.remapping.far_positions(at, at)[0], dtype, factor)
    return RotaryTables(rotator.at(at, dtype, factor), far, outside)


def _keys(
    spec: ScoreSpec, head_dim: int, positions: Tensor, dtype: torch.dtype, far_to_near: bool
) -> RotaryTables:
    rotator, at, rules = _rotator(spec, head_dim), positions.double(), spec.chunk_remapping
    if rotator is None:
        return RotaryTables()
    if rules is not None:
        chunk = positions.div(rules.known("size"), rounding_mode="floor").long()
        rotation = rotator.at(rules.key_positions(at), dtype, sign=-1)
        return RotaryTables(ChunkedRotation((rotation,), by_head(chunk[..., None], 3)))
    if spec.remapping is None:
        return RotaryTables(rotator.at(at, dtype, sign=-1))
    far = spec.remapping.far_positions(at, at)[1]
    if far_to_near:
        return RotaryTables(rotator.at(at - far, dtype, sign=-1))
    near = rotator.at(at, dtype, sign=-1)
    return RotaryTables(near, rotator.at(far, dtype, sign=-1))


# Tables of positions 0 … capacity − 1, of which calls take rows: a sequence that grows token by
# token seldom needs a new one. They are ordinary tensors even when first asked for in inference
# mode, since training reuses them.


@lru_cache(maxsize=32)
@torch.inference_mode(False)
def _counted_queries(
    spec: ScoreSpec,
    head_dim: int,
    dtype: torch.dtype,
    capacity: int,
    device: torch.device,
    visible: int | None,
) -> RotaryTables:
    """For i + 1 visible keys of query i, or as many for every query."""
    query = torch.arange(capacity, device=device)
    n = query + 1 if visible is None else torch.tensor([visible], device=device)
    return _queries(spec, head_dim, query, n, dtype)


@lru_cache(maxsize=32)
@torch.inference_mode(False)
def _counted_keys(
    spec: ScoreSpec,
    head_dim: int,
    dtype: torch.dtype,
    capacity: int,
    device: torch.device,
    far_to_near: bool,
) -> RotaryTables:
    return _keys(spec, head_dim, torch.arange(capacity, device=device), dtype, far_to_near)


def _capacity(spec: ScoreSpec, head_dim: int, dtype: torch.dtype, positions: int) -> int:
    """Choose the length of a table: the next power of two, so that growth seldom makes a new one.

    Where features grow with the position, the tables end where the dtype does.
    """
    capacity, position = max(64, 1 << (positions - 1).bit_length()), spec.position
    growth = position.log_growth(head_dim) if isinstance(position, RotaryPosition) else None
    if growth is None:
        return capacity
    return max(positions, min(capacity, _last_position(growth, dtype) + 1))


def _last_position(log_growth: Float[Tensor, "p"], dtype: torch.dtype) -> int:
    """How far features that grow with the absolute position stay well inside the dtype's range."""
    range_of_dtype = math.log(torch.finfo(dtype).max) / 2
    fastest = float(log_growth.abs().max())
    return int(range_of_dtype / fastest) if fastest else 2**62


def _refuse_overflow(exponent: Tensor, log_growth: Tensor, dtype: torch.dtype) -> None:
    """Raise `InputError` where features grow out of a dtype's range; not while compiling."""
    if traced() or exponent.is_meta or not exponent.numel():
        return
    last = _last_position(log_growth, dtype)
    if float(exponent.abs().max()) > (last + 0.5) * float(log_growth.abs().max()):
        raise InputError(
            f"XPos in {dtype} works up to position {last}: beyond it a query shrinks and a key "
            "grows out of the dtype's range; use a larger scale or a wider dtype"
        )


@lru_cache(maxsize=256)
def feature_pairs(start: int, count: int, interleaved: bool) -> tuple[slice, slice]:
    """The first and the second features of the pairs that rotate."""
    end = start + 2 * count
    if interleaved:
        return slice(start, end, 2), slice(start + 1, end, 2)
    return slice(start, start + count), slice(start + count, end)


def rotate_rows(
    x: Tensor, cos: Tensor, sin: Tensor, rest: Tensor, interleaved: bool, start: int
) -> Tensor:
    """Rotate pair (a, b) of x to (a·cos − b·sin, b·cos + a·sin), without a gradient."""
    wide = x if x.dtype == cos.dtype else x.to(cos.dtype)
    y = torch.empty_like(wide, memory_format=torch.contiguous_format)
    first, second = feature_pairs(start, cos.shape[-1], interleaved)
    a, b, left, right = wide[..., first], wide[..., second], y[..., first], y[..., second]
    end = start + 2 * cos.shape[-1]
    if start > 0:
        torch.mul(wide[..., :start], rest, out=y[..., :start])
    if end < x.shape[-1]:
        torch.mul(wide[..., end:], rest, out=y[..., end:])
    torch.mul(a, cos, out=left)
    left.addcmul_(b, sin, value=-1)
    torch.mul(b, cos, out=right)
    right.addcmul_(a, sin)
    return y.to(x.dtype)


def _rotate_plainly(
    x: Tensor, cos: Tensor, sin: Tensor, rest: Tensor, interleaved: bool, start: int
) -> Tensor:
    """The same rotation in operations that a compiler can fuse."""
    wide, end = x.to(cos.dtype), start + 2 * cos.shape[-1]
    first, second = feature_pairs(start, cos.shape[-1], interleaved)
    a, b = wide[..., first], wide[..., second]
    left, right = a * cos - b * sin, b * cos + a * sin
    y = torch.stack((left, right), -1).flatten(-2) if interleaved else torch.cat((left, right), -1)
    if end - start < x.shape[-1]:
        y = torch.cat((wide[..., :start] * rest, y, wide[..., end:] * rest), -1)
    return y.to(x.dtype)


class _Rotate(torch.autograd.Function):
    """The rotation is linear: its backward is the rotation back, times the same scale."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        rest: Tensor,
        interleaved: bool,
        start: int,
    ) -> Tensor:
        # The tables are constants: no hook on saved tensors needs to see them.
        ctx.tables = cos, sin, rest, interleaved, start
        return rotate_rows(x, cos, sin, rest, interleaved, start)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin, *settings = ctx.tables
        # With gradients on, a derivative of this derivative is wanted: it is a rotation as well.
        rotate = _Rotate.apply if torch.is_grad_enabled() else rotate_rows
        rotate = _rotate_plainly if use_plain_ops() else rotate
        return rotate(grad, cos, -sin, *settings), None, None, None, None, None


rotate_with_gradient: Any = super(torch.autograd.Function, _Rotate).apply
"""`rotate_rows` known to autograd, past what `apply` does for torch.func, which takes as long."""
