"""LayerNorm and RMSNorm over the last axis, with every choice that families differ in explicit."""

from __future__ import annotations

from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from normattn.errors import InputError

EpsPlacement = Literal["inside", "outside"]


class LayerNorm(nn.Module):
    """Layer normalisation: y = (x − mean(x)) / √(var(x) + eps) · gain + bias, biased variance.

    Shapes: (..., dim) → (..., dim). Statistics are taken in float32 when the input is bfloat16
    or float16. Defaults: eps 1e-6, a gain (ones at the start) and a bias (zeros at the start).
    Raises `InputError` for a width below 1 or a negative eps. Source: arXiv 1607.06450.
    """

    def __init__(
        self, dim: int, eps: float = 1e-6, *, gain: bool = True, bias: bool = True
    ) -> None:
        super().__init__()
        _check(dim, eps)
        self.dim = dim
        self.eps = eps
        self.gain = nn.Parameter(torch.ones(dim)) if gain else None
        self.bias = nn.Parameter(torch.zeros(dim)) if bias else None

    def forward(self, x: Float[Tensor, "... dim"]) -> Float[Tensor, "... dim"]:
        """Normalise the last axis of `x`."""
        wide = _widen(x)
        gain = None if self.gain is None else self.gain.to(wide.dtype)
        bias = None if self.bias is None else self.bias.to(wide.dtype)
        return F.layer_norm(wide, (self.dim,), gain, bias, self.eps).to(x.dtype)

    def extra_repr(self) -> str:
        """Name the settings in the printed module."""
        gain, bias = self.gain is not None, self.bias is not None
        return f"{self.dim}, eps={self.eps}, gain={gain}, bias={bias}"


class RMSNorm(nn.Module):
    """Root-mean-square normalisation: y = x / rms(x) · gain.

    `eps_placement` "inside" (default): rms(x) = √(mean(x²) + eps). "outside": rms(x) =
    √(mean(x²)) + eps. Shapes: (..., dim) → (..., dim).
    Statistics are taken in float32 when the input is bfloat16 or float16. Defaults: eps 1e-6, a
    gain (ones at the start). Raises `InputError` for a width below 1, a negative eps or an unknown
    placement. Source: arXiv 1910.07467.
    """

    def __init__(
        self,
        dim: int,
        eps: float = 1e-6,
        *,
        gain: bool = True,
        eps_placement: EpsPlacement = "inside",
    ) -> None:
        super().__init__()
        _check(dim, eps)
        if eps_placement not in ("inside", "outside"):
            raise InputError(
                f"RMSNorm's eps_placement is {eps_placement!r}; it can be 'inside' or 'outside'"
            )
        self.dim = dim
        self.eps = eps
        self.eps_placement = eps_placement
        self.gain = nn.Parameter(torch.ones(dim)) if gain else None

    def forward(self, x: Float[Tensor, "... dim"]) -> Float[Tensor, "... dim"]:
        """Normalise the last axis of `x`."""
        wide = _widen(x)
        gain = None if self.gain is None else self.gain.to(wide.dtype)
        if self.eps_placement == "outside":
            rms = torch.linalg.vector_norm(wide, dim=-1, keepdim=True) * float(self.dim**-0.5)
            normal: Tensor = wide / (rms + self.eps)
            return (normal if gain is None else normal * gain).to(x.dtype)
        if wide.device.type == "cpu" and not torch.compiler.is_compiling():
            # On CPU torch runs F.rms_norm as separate small operations, several times slower.
            y: Tensor = _RMSNormInside.apply(wide, gain, self.eps)  # type: ignore[no-untyped-call]
            return y.to(x.dtype)
        return F.rms_norm(wide, (self.dim,), gain, self.eps).to(x.dtype)

    def extra_repr(self) -> str:
        """Name the settings in the printed module."""
        return (
            f"{self.dim}, eps={self.eps}, gain={self.gain is not None}, "
            f"eps_placement={self.eps_placement!r}"
        )


class _RMSNormInside(torch.autograd.Function):
    """y = x·r·g with r = (mean(x²) + eps)^−½; two temporaries backward instead of seven."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor | None, eps: float) -> Tensor:
        norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        inverse = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, gain, inverse)
        normal = x * inverse
        return normal if gain is None else normal.mul_(gain)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        # dx = r·(g·dy − n·⟨g·dy, n⟩/dim) with n = x·r, and dg = Σ rows dy·n.
        x, gain, inverse = ctx.saved_tensors
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


def _widen(x: Tensor) -> Tensor:
    """Half-precision input in float32, so that its statistics are."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _check(dim: int, eps: float) -> None:
    if dim < 1:
        raise InputError(f"a norm over {dim} features was asked for; the width must be at least 1")
    if not eps >= 0:
        raise InputError(f"a norm's eps is {eps}; it must be 0 or more")
