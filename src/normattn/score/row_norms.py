"""LayerNorm and RMSNorm of contiguous rows on a CPU, chunk by chunk, in float32 or wider.

A chunk stays in a core's cache between the few operations that norm it, and half precision is
widened there: no temporary is as large as the rows. torch's own kernels take several passes for RMS
norm, and add up the parameters' gradients of half-precision rows in half precision.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

CHUNK_BYTES = 1 << 19
"""About this much of the rows, in float32, is worked on at a time."""


def wide(dtype: torch.dtype) -> torch.dtype:
    """What a norm's statistics are taken in: float32 for half precision."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def norm_rows(
    x: Float[Tensor, "*rows d"],
    gain: Float[Tensor, " d"] | None,
    bias: Float[Tensor, " d"] | None,
    eps: float,
    *,
    centred: bool,
) -> Float[Tensor, "*rows d"]:
    """(x − m)/√(mean (x − m)² + eps)·gain + bias in the dtype of x, where m is mean x, or 0.

    `centred` is LayerNorm; without, it is RMSNorm, which has no bias.
    """
    if not torch.is_grad_enabled():
        return _forward(x, gain, bias, eps, centred)[0]
    y: Tensor = _RowNorm.apply(x, gain, bias, eps, centred)  # type: ignore[no-untyped-call]
    return y


def _forward(
    x: Tensor, gain: Tensor | None, bias: Tensor | None, eps: float, centred: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """y, and m and 1/√… of every row, (rows, 1)."""
    dim, dtype = x.shape[-1], wide(x.dtype)
    y = torch.empty_like(x)
    gain, bias = _as(gain, dtype), _as(bias, dtype)
    mean, inverse = torch.zeros(2, x.numel() // dim, 1, dtype=dtype)
    for part, out, m, r in zip(*_chunks(dim, x, y, mean, inverse), strict=True):
        part = part.to(dtype)
        if centred:
            normal, found_m, found_r = torch.native_layer_norm(part, [dim], gain, bias, eps)
            m.copy_(found_m)
            r.copy_(found_r)
            out.copy_(normal)
            continue
        torch.linalg.vector_norm(part, dim=-1, keepdim=True, out=r)
        r.square_().div_(dim).add_(eps).rsqrt_()
        # In place where `part` is this chunk's own copy.
        normal = torch.mul(part, r, out=out if dtype == x.dtype else part)
        if gain is not None:
            normal.mul_(gain)
        if dtype != x.dtype:
            out.copy_(normal)
    return y, mean, inverse


def _backward(
    x: Tensor,
    grad: Tensor,
    kept: tuple[Tensor, Tensor],
    parameters: tuple[Tensor | None, Tensor | None],
    wanted: list[bool],
    centred: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, gain and bias.

    With n the normalised rows LayerNorm's kernel gives r·(g·dy − n·⟨g·dy, n⟩/d − Σ g·dy/d). Where
    no mean was taken, its last term, one number a row, is put back.
    """
    dim, dtype = x.shape[-1], kept[1].dtype
    gain, bias = (_as(parameter, dtype) for parameter in parameters)
    grad_x = torch.empty_like(x)
    sums = torch.zeros(2, dim, dtype=dtype)
    for part, above, m, r, out in zip(*_chunks(dim, x, grad, *kept, grad_x), strict=True):
        part, above = part.to(dtype), above.to(dtype)
        by_x, by_gain, by_bias = torch.ops.aten.native_layer_norm_backward(
            above, part, [dim], m, r, gain, bias, [True, *wanted]
        )
        if not centred:
            total = above.sum(-1) if gain is None else torch.mv(above, gain)
            by_x.add_(total.unsqueeze(-1).mul_(r).div_(dim))
        out.copy_(by_x)
        if wanted[0]:
            sums[0].add_(by_gain)
        if wanted[1]:
            sums[1].add_(by_bias)
    return grad_x, sums[0], sums[1]


class _RowNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gain: Tensor | None, bias: Tensor | None, eps: float, centred: bool
    ) -> Tensor:
        y, mean, inverse = _forward(x, gain, bias, eps, centred)
        ctx.save_for_backward(x, gain, bias, mean, inverse)
        ctx.eps, ctx.centred = eps, centred
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, gain, bias, mean, inverse = ctx.saved_tensors
        if torch.is_grad_enabled():
            gradients = _differentiable((x, gain, bias), grad, ctx.eps, ctx.centred)
            return *gradients, None, None
        wanted = [p is not None and p.requires_grad for p in (gain, bias)]
        by_x, by_gain, by_bias = _backward(
            x, grad.contiguous(), (mean, inverse), (gain, bias), wanted, ctx.centred
        )
        return (
            by_x,
            by_gain.to(gain.dtype) if wanted[0] else None,
            by_bias.to(bias.dtype) if wanted[1] else None,
            None,
            None,
        )


def _differentiable(
    inputs: tuple[Tensor, Tensor | None, Tensor | None], grad: Tensor, eps: float, centred: bool
) -> list[Tensor | None]:
    """The same gradients through torch's own operations, for a derivative of the derivative."""
    x, gain, bias = inputs
    shape, dtype = (x.shape[-1],), wide(x.dtype)
    if centred:
        y = F.layer_norm(x.to(dtype), shape, _as(gain, dtype), _as(bias, dtype), eps)
    else:
        y = F.rms_norm(x.to(dtype), shape, _as(gain, dtype), eps)
    wanted = [part for part in inputs if part is not None and part.requires_grad]
    gradients = iter(torch.autograd.grad(y.to(x.dtype), wanted, grad, create_graph=True))
    return [next(gradients) if p is not None and p.requires_grad else None for p in inputs]


def _chunks(dim: int, *rows: Tensor) -> list[tuple[Tensor, ...]]:
    """Contiguous tensors, each in pieces of as many rows; the last may be shorter."""
    size = max(1, CHUNK_BYTES // (4 * dim))
    return [torch.split(tensor.view(-1, tensor.shape[-1]), size) for tensor in rows]


def _as(parameter: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if parameter is None else parameter.to(dtype)
