"""RMS normalisation of the last axis, x/√(mean x² + eps)·g, fast on a CPU too.

On a CPU torch runs `F.rms_norm` as separate small operations, several times slower than this.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from normattn.kernels.place import on_cpu
from normattn.plain import plain
from normattn.score import row_norms


def rms_norm(
    x: Float[Tensor, "*rows d"], gain: Float[Tensor, " d"] | None, eps: float
) -> Float[Tensor, "*rows d"]:
    """x/√(mean x² + eps)·gain in the dtype of x; computed in float32 where that is a half one."""
    eager = on_cpu(x) and not plain()
    # Strided heads stay as they lie, and what is small is done at once.
    if eager and x.is_contiguous() and x.numel() * 4 > row_norms.CHUNK_BYTES:
        return row_norms.norm_rows(x, gain, None, eps, centred=False)
    dtype = row_norms.wide(x.dtype)
    rows, own = x.to(dtype), None if gain is None else gain.to(dtype)
    if not eager:
        return F.rms_norm(rows, (x.shape[-1],), own, eps).to(x.dtype)
    if not torch.is_grad_enabled():
        return _normed(rows, own, eps)[0].to(x.dtype)
    y: Tensor = _RMSNorm.apply(rows, own, eps)  # type: ignore[no-untyped-call]
    return y.to(x.dtype)


def _normed(x: Tensor, gain: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """y and r = (mean(x²) + eps)^−½."""
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    inverse = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    normal = x * inverse
    return normal if gain is None else normal.mul_(gain), inverse


class _RMSNorm(torch.autograd.Function):
    """y = x·r·g with r = (mean(x²) + eps)^−½; two temporaries backward instead of seven."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor | None, eps: float) -> Tensor:
        y, inverse = _normed(x, gain, eps)
        ctx.save_for_backward(x, gain, inverse)
        ctx.eps = eps
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        # dx = r·(g·dy − n·⟨g·dy, n⟩/dim) with n = x·r, and dg = Σ rows dy·n.
        x, gain, inverse = ctx.saved_tensors
        if torch.is_grad_enabled():
            return *_differentiable(x, gain, grad, ctx.eps), None
        dim = x.shape[-1]
        normal = x * inverse
        product = grad * normal
        grad_gain = None
        if gain is None:
            along = product.sum(-1, keepdim=True).div_(dim)
            grad_x = product.copy_(grad)
        else:
            if ctx.needs_input_grad[1]:
                grad_gain = product.reshape(-1, dim).sum(0)
            along = torch.mv(product.reshape(-1, dim), gain).div_(dim).view(*x.shape[:-1], 1)
            grad_x = torch.mul(grad, gain, out=product)
        grad_x.addcmul_(normal, along, value=-1.0).mul_(inverse)
        return grad_x, grad_gain, None


def _differentiable(
    x: Tensor, gain: Tensor | None, grad: Tensor, eps: float
) -> tuple[Tensor | None, Tensor | None]:
    """The same gradients through torch's own operations, for a derivative of the derivative."""
    inputs = [part for part in (x, gain) if part is not None and part.requires_grad]
    y = F.rms_norm(x, (x.shape[-1],), gain, eps)
    gradients = iter(torch.autograd.grad(y, inputs, grad, create_graph=True))
    by_x = next(gradients) if x.requires_grad else None
    return by_x, next(gradients) if gain is not None and gain.requires_grad else None
