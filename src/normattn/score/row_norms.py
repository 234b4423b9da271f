"""LayerNorm and RMSNorm of contiguous rows on a CPU, in float32 or wider, no temporary as large.

LayerNorm of half-precision rows is torch's kernel, which widens as it reads. Its gradients of the
parameters alone are not: that kernel adds them up in half precision (5 to 9 % off after 2,048
rows). These and RMS norm, for which torch takes several passes, go chunk by chunk: a chunk is
widened and stays in a core's cache between the few operations on it.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

_kernel = torch.ops.aten.native_layer_norm_backward
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
    if centred:
        whole = torch.native_layer_norm(x, [dim], *_widened(x, gain, bias), eps)
        return whole[0], whole[1].view(-1, 1), whole[2].view(-1, 1)
    y = torch.empty_like(x)
    gain = _as(gain, dtype)
    mean, inverse = torch.zeros(2, x.numel() // dim, 1, dtype=dtype)
    for part, out, r in zip(*_chunks(_rows(dim), x, y, inverse), strict=True):
        part = part.to(dtype)
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
    if centred:
        learned = _widened(x, *parameters)
        grad_x, *_ = _kernel(grad, x, [dim], *kept, *learned, [True, False, False])
        return grad_x, *_by_parameters(x, grad, kept, learned, wanted)
    gain = _as(parameters[0], dtype)
    grad_x, sums = torch.empty_like(x), torch.zeros(2, dim, dtype=dtype)
    for part, above, m, r, out in zip(*_chunks(_rows(dim), x, grad, *kept, grad_x), strict=True):
        part, above = part.to(dtype), above.to(dtype)
        by_x, by_gain, _ = _kernel(above, part, [dim], m, r, gain, None, [True, wanted[0], False])
        total = above.sum(-1) if gain is None else torch.mv(above, gain)
        by_x.add_(total.unsqueeze(-1).mul_(r).div_(dim))
        out.copy_(by_x)
        if wanted[0]:
            sums[0].add_(by_gain)
    return grad_x, sums[0], sums[1]


def _by_parameters(
    x: Tensor,
    grad: Tensor,
    kept: tuple[Tensor, Tensor],
    learned: tuple[Tensor | None, Tensor | None],
    wanted: list[bool],
) -> tuple[Tensor, Tensor]:
    """LayerNorm's gradients of gain and bias, added up in the dtype of the statistics."""
    dim, dtype = x.shape[-1], kept[1].dtype
    gain, bias = torch.zeros(2, dim, dtype=dtype).unbind()
    if not any(wanted):
        return gain, bias
    # Room that is taken once: fresh pages cost more than what is written to them.
    rows = _rows(2 * dim)
    own, above = torch.empty(2, min(len(kept[1]), rows), dim, dtype=dtype).unbind()
    for part, grads, m, r in zip(*_chunks(rows, x, grad, *kept), strict=True):
        if len(part) < len(own):
            own, above = own[: len(part)], above[: len(part)]
        own.copy_(part)
        above.copy_(grads)
        _, by_gain, by_bias = _kernel(above, own, [dim], m, r, *learned, [False, *wanted])
        if wanted[0]:
            gain += by_gain
        if wanted[1]:
            bias += by_bias
    return gain, bias


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


def _chunks(count: int, *rows: Tensor) -> list[tuple[Tensor, ...]]:
    """Contiguous tensors, each in pieces of as many rows; the last may be shorter."""
    return [torch.split(tensor.view(-1, tensor.shape[-1]), count) for tensor in rows]


def _rows(dim: int) -> int:
    """How many rows of `dim` features make a chunk."""
    return max(1, CHUNK_BYTES // (4 * dim))


def _widened(
    x: Tensor, gain: Tensor | None, bias: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Gain and bias for torch's kernel, which keeps statistics in the dtype of the gain."""
    dtype = wide(x.dtype)
    if gain is None and dtype != x.dtype:
        gain = torch.ones(x.shape[-1], dtype=dtype)
    return _as(gain, dtype), _as(bias, dtype)


def _as(parameter: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if parameter is None else parameter.to(dtype)
