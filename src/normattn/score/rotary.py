"""Rotation of feature pairs by cos and sin tables, in both layouts, with λ folded in.

Legend: B batch, H heads, T tokens, D head dimension, P = D/2 pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Rotation:
    """cos and sin of the angles, each (T, P) or (B, 1, T, P), already multiplied by a scale."""

    cos: Float[Tensor, "*b t p"]
    sin: Float[Tensor, "*b t p"]
    interleaved: bool

    def __call__(self, x: Float[Tensor, "b h t d"]) -> Float[Tensor, "b h t d"]:
        """Turn pair (a, b) into (a·cos − b·sin, b·cos + a·sin)."""
        if torch.compiler.is_compiling():
            return _turn_plainly(x, self.cos, self.sin, self.interleaved)
        y: Tensor = _Rotate.apply(x, self.cos, self.sin, self.interleaved, False)  # type: ignore[no-untyped-call]
        return y


def rotation(
    positions: Float[Tensor, "*b t"],
    frequencies: Float[Tensor, "p"],
    scale: Float[Tensor, "*c u"] | float,
    interleaved: bool,
    dtype: torch.dtype,
) -> Rotation:
    """The rotation of these positions, times `scale` per position; angles in float64."""
    angle = positions.double()[..., None] * frequencies.to(positions.device)
    if isinstance(scale, Tensor):
        scale = scale.double()[..., None]
    cos, sin = angle.cos() * scale, angle.sin() * scale
    if cos.dim() == 3:
        cos, sin = cos[:, None], sin[:, None]
    table = torch.float64 if dtype == torch.float64 else torch.float32
    return Rotation(cos.to(table), sin.to(table), interleaved)


def _pairs(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    if interleaved:
        return x[..., 0::2], x[..., 1::2]
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


def _turn(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, back: bool) -> Tensor:
    wide = x if x.dtype == cos.dtype else x.to(cos.dtype)
    y = torch.empty_like(wide, memory_format=torch.contiguous_format)
    a, b = _pairs(wide, interleaved)
    left, right = _pairs(y, interleaved)
    sign = -1 if back else 1
    torch.mul(a, cos, out=left)
    left.addcmul_(b, sin, value=-sign)
    torch.mul(b, cos, out=right)
    right.addcmul_(a, sin, value=sign)
    return y.to(x.dtype)


def _turn_plainly(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """The same rotation in operations that a compiler can fuse."""
    a, b = _pairs(x.to(cos.dtype), interleaved)
    left, right = a * cos - b * sin, b * cos + a * sin
    if interleaved:
        return torch.stack((left, right), -1).flatten(-2).to(x.dtype)
    return torch.cat((left, right), -1).to(x.dtype)


class _Rotate(torch.autograd.Function):
    """The rotation is linear: its backward is the rotation back, times the same scale."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, back: bool
    ) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.settings = interleaved, back
        return _turn(x, cos, sin, interleaved, back)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        cos, sin = ctx.saved_tensors
        interleaved, back = ctx.settings
        # With gradients on, a derivative of this derivative is wanted: it is a rotation as well.
        turn = _Rotate.apply if torch.is_grad_enabled() else _turn
        return turn(grads[0], cos, sin, interleaved, not back), None, None, None, None
