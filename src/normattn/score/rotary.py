"""Rotation of feature pairs by cos and sin tables, in both layouts, with λ folded in.

Legend: B batch, H heads, T tokens, D head dimension, P = D/2 pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from normattn.errors import InputError
from normattn.plain import plain


@dataclass(frozen=True)
class Rotation:
    """cos and sin of the angles, each (T, P) or (B, 1, T, P), already multiplied by a scale.

    The 2·P features from `start` on turn; the others do not: they are multiplied by `rest`, (T, 1)
    or (B, 1, T, 1).
    """

    cos: Float[Tensor, "*b t p"]
    sin: Float[Tensor, "*b t p"]
    rest: Float[Tensor, "*b t 1"]
    interleaved: bool
    start: int = 0

    def __call__(self, x: Float[Tensor, "b h t d"]) -> Float[Tensor, "b h t d"]:
        """Turn pair (a, b) into (a·cos − b·sin, b·cos + a·sin)."""
        tables = self.cos, self.sin, self.rest
        if plain():
            return _turn_plainly(x, *tables, self.interleaved, self.start)
        y: Tensor = _Rotate.apply(x, *tables, self.interleaved, self.start, False)  # type: ignore[no-untyped-call]
        return y

    def rows(self, rows: slice) -> Rotation:
        """The rotation of some of the positions."""
        cos, sin, rest = (x[..., rows, :] for x in (self.cos, self.sin, self.rest))
        return Rotation(cos, sin, rest, self.interleaved, self.start)


@dataclass(frozen=True)
class SideBySide:
    """Queries turned to the places of several rules, one behind the other, as `ByChunk` has them.

    Rows of the first chunks have no keys of the last rules, and no features for them.
    """

    turns: tuple[Rotation, ...]

    def read_by(self, block: int) -> SideBySide:
        """For the rows of a chunk."""
        return SideBySide(self.turns[: max(block, 0) + 1])

    def __call__(self, x: Float[Tensor, "b h t d"]) -> Float[Tensor, "b h t wide"]:
        """All of them."""
        return self.laid(lambda turn: turn(x))

    def laid(self, turned: Callable[[Rotation], Tensor]) -> Float[Tensor, "b h t wide"]:
        """What `turned` makes of each."""
        return torch.cat([turned(turn) for turn in self.turns], -1)

    def rows(self, rows: slice) -> SideBySide:
        """The rotations of some of the positions."""
        return SideBySide(tuple(turn.rows(rows) for turn in self.turns))


@dataclass(frozen=True)
class ByChunk:
    """Keys as the rows of chunk `block` read them: at the place of one of three rules, 0 elsewhere.

    `chunk` (S, 1) or (B, 1, S, 1) is that of each key. The rules are those of the rows' own chunk,
    of the one before and of those further away; the product with `SideBySide` queries is that of
    the rule.
    """

    turn: Rotation
    chunk: Int[Tensor, "*b s 1"]
    block: int = 0

    def __call__(self, x: Float[Tensor, "b g s d"]) -> Float[Tensor, "b g s wide"]:
        """Turned and laid out."""
        return self.laid(lambda turn: turn(x))

    def laid(self, turned: Callable[[Rotation], Tensor]) -> Float[Tensor, "b g s wide"]:
        """What `turned` makes of them, laid out."""
        y = turned(self.turn)
        rules = min(max(self.block, 0) + 1, 3)
        rule = (self.block - self.chunk).clamp(0, rules - 1)
        return torch.cat([torch.where(rule == n, y, 0.0) for n in range(rules)], -1)

    def read_by(self, block: int) -> ByChunk:
        """For the rows of a chunk."""
        return ByChunk(self.turn, self.chunk, block)

    def rows(self, rows: slice) -> ByChunk:
        """The tables of some of the positions."""
        return ByChunk(self.turn.rows(rows), self.chunk[..., rows, :], self.block)


def rotation(
    positions: Float[Tensor, "*b t"],
    frequencies: Float[Tensor, "p"],
    scale: Float[Tensor, "*c u"] | float,
    interleaved: bool,
    dtype: torch.dtype,
    log_growth: Float[Tensor, "p"] | None = None,
) -> Rotation:
    """The rotation of these positions, times `scale` per position; angles in float64.

    Pair m is multiplied by exp(position · log_growth_m) as well, where growth is given.
    """
    positions = positions.double()
    angle = positions[..., None] * frequencies.to(positions.device)
    if isinstance(scale, Tensor):
        scale = scale.double()[..., None]
    cos, sin = angle.cos() * scale, angle.sin() * scale
    if log_growth is not None:
        exponent = positions[..., None] * log_growth.to(positions.device)
        _refuse_overflow(exponent, log_growth, dtype)
        cos, sin = cos * exponent.exp(), sin * exponent.exp()
    rest = torch.ones_like(positions)[..., None] * scale
    if cos.dim() == 3:
        cos, sin, rest = cos[:, None], sin[:, None], rest[:, None]
    table = torch.float64 if dtype == torch.float64 else torch.float32
    return Rotation(cos.to(table), sin.to(table), rest.to(table), interleaved)


def last_position(log_growth: Float[Tensor, "p"], dtype: torch.dtype) -> int:
    """How far features that grow with the absolute position stay well inside the dtype's range."""
    room = math.log(torch.finfo(dtype).max) / 2
    fastest = float(log_growth.abs().max())
    return int(room / fastest) if fastest else 2**62


def _refuse_overflow(exponent: Tensor, log_growth: Tensor, dtype: torch.dtype) -> None:
    """Growth with the absolute position ends where the dtype does; unasked where no number is."""
    if torch.compiler.is_compiling() or exponent.is_meta:
        return
    last = last_position(log_growth, dtype)
    if float(exponent.abs().max()) > (last + 0.5) * float(log_growth.abs().max()):
        raise InputError(
            f"XPos in {dtype} reads up to position {last}: beyond it a query shrinks and a key "
            "grows out of the dtype's range; use a larger scale or a wider dtype"
        )


def _pairs(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    if interleaved:
        return x[..., 0::2], x[..., 1::2]
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


def _turn(
    x: Tensor, cos: Tensor, sin: Tensor, rest: Tensor, interleaved: bool, start: int, back: bool
) -> Tensor:
    wide = x if x.dtype == cos.dtype else x.to(cos.dtype)
    y = torch.empty_like(wide, memory_format=torch.contiguous_format)
    end = start + 2 * cos.shape[-1]
    a, b = _pairs(wide[..., start:end], interleaved)
    left, right = _pairs(y[..., start:end], interleaved)
    for still in (slice(start), slice(end, None)):
        if y[..., still].shape[-1]:
            torch.mul(wide[..., still], rest, out=y[..., still])
    sign = -1 if back else 1
    torch.mul(a, cos, out=left)
    left.addcmul_(b, sin, value=-sign)
    torch.mul(b, cos, out=right)
    right.addcmul_(a, sin, value=sign)
    return y.to(x.dtype)


def _turn_plainly(
    x: Tensor, cos: Tensor, sin: Tensor, rest: Tensor, interleaved: bool, start: int
) -> Tensor:
    """The same rotation in operations that a compiler can fuse."""
    wide, turned = x.to(cos.dtype), 2 * cos.shape[-1]
    end = start + turned
    a, b = _pairs(wide[..., start:end], interleaved)
    left, right = a * cos - b * sin, b * cos + a * sin
    y = torch.stack((left, right), -1).flatten(-2) if interleaved else torch.cat((left, right), -1)
    if turned < x.shape[-1]:
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
        back: bool,
    ) -> Tensor:
        ctx.save_for_backward(cos, sin, rest)
        ctx.settings = interleaved, start, back
        return _turn(x, cos, sin, rest, interleaved, start, back)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin, rest = ctx.saved_tensors
        interleaved, start, back = ctx.settings
        if plain():
            turned = _turn_plainly(grads[0], cos, sin if back else -sin, rest, interleaved, start)
            return turned, None, None, None, None, None, None
        # With gradients on, a derivative of this derivative is wanted: it is a rotation as well.
        turn = _Rotate.apply if torch.is_grad_enabled() else _turn
        turned = turn(grads[0], cos, sin, rest, interleaved, start, not back)
        return turned, None, None, None, None, None, None
