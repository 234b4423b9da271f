"""LayerNorm and RMSNorm over the last axis, and their replacements DyT and Derf."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from normattn.errors import InputError, require_sizes
from normattn.kernels.numerics import at_least_float32
from normattn.layers.checks import check_input
from normattn.score.norms import bounded, rms_norm


class LayerNorm(nn.Module):
    """y = (x − mean(x)) / √(var(x) + eps) · gain + bias, with the biased variance.

    Shapes: (..., dim) → (..., dim). Statistics are taken in float32 when the input is bfloat16
    or float16. The gain starts at ones, the bias at zeros; `gain=False` leaves both out. Raises
    `InputError` for a width below 1 or a negative eps. Source: arXiv 1607.06450.
    """

    def __init__(self, dim: int, eps: float = 1e-6, *, gain: bool = True) -> None:
        super().__init__()
        _check(dim, eps)
        self.dim, self.eps = dim, eps
        self.gain = nn.Parameter(torch.ones(dim)) if gain else None
        self.bias = nn.Parameter(torch.zeros(dim)) if gain else None

    def forward(self, x: Float[Tensor, "... dim"]) -> Float[Tensor, "... dim"]:
        """Normalise the last axis of `x`."""
        check_input("a norm's input", x, self.dim, axes=None)
        dtype = at_least_float32(x.dtype)
        gain, bias = (None if p is None else p.to(dtype) for p in (self.gain, self.bias))
        return F.layer_norm(x.to(dtype), (self.dim,), gain, bias, self.eps).to(x.dtype)

    def extra_repr(self) -> str:
        """Name the settings in the printed module."""
        return f"{self.dim}, eps={self.eps}, gain={self.gain is not None}"


class RMSNorm(nn.Module):
    """y = x / rms(x) · gain with rms(x) = √(mean(x²) + eps), or √(mean(x²)) + eps.

    `eps_placement` is "inside" or "outside" of the root. Shapes: (..., dim) → (..., dim).
    Half-precision inputs have float32 statistics. The gain starts at ones. Raises `InputError` for
    a width below 1, a negative eps or an unknown placement. Source: arXiv 1910.07467.
    """

    def __init__(
        self,
        dim: int,
        eps: float = 1e-6,
        *,
        gain: bool = True,
        eps_placement: Literal["inside", "outside"] = "inside",
    ) -> None:
        super().__init__()
        _check(dim, eps)
        if eps_placement not in ("inside", "outside"):
            raise InputError(
                f"RMSNorm's eps_placement is {eps_placement!r}; it can be 'inside' or 'outside'"
            )
        self.dim, self.eps, self.eps_placement = dim, eps, eps_placement
        self.gain = nn.Parameter(torch.ones(dim)) if gain else None

    def forward(self, x: Float[Tensor, "... dim"]) -> Float[Tensor, "... dim"]:
        """Normalise the last axis of `x`."""
        check_input("a norm's input", x, self.dim, axes=None)
        if self.eps_placement == "inside":
            return rms_norm(x, self.gain, self.eps)
        rows = x.to(at_least_float32(x.dtype))
        rms = torch.linalg.vector_norm(rows, dim=-1, keepdim=True) * float(self.dim**-0.5)
        normal: Tensor = rows / (rms + self.eps)
        return (normal if self.gain is None else normal * self.gain.to(rows.dtype)).to(x.dtype)

    def extra_repr(self) -> str:
        """Name the settings in the printed module."""
        gain = self.gain is not None
        return f"{self.dim}, eps={self.eps}, gain={gain}, eps_placement={self.eps_placement!r}"


class DyT(nn.Module):
    """y = gain ⊙ tanh(α·x) + bias with one learned α: a norm without statistics.

    Shapes: (..., dim) → (..., dim). α, gain and bias start at ½, 1 and 0. Source: arXiv 2503.10622.
    """

    def __init__(self, dim: int, *, gain: bool = True) -> None:
        super().__init__()
        _check(dim, 0.0)
        self.dim = dim
        self.alpha = nn.Parameter(torch.full((), 0.5))
        self.shift: nn.Parameter | None = None
        self.gain = nn.Parameter(torch.ones(dim)) if gain else None
        self.bias = nn.Parameter(torch.zeros(dim)) if gain else None

    def forward(self, x: Float[Tensor, "... dim"]) -> Float[Tensor, "... dim"]:
        """Bound each number of `x`, then apply gain and bias."""
        check_input("a norm's input", x, self.dim, axes=None)
        return bounded(x, self.alpha, self.shift, self.gain, self.bias)

    def extra_repr(self) -> str:
        """Name the settings in the printed module."""
        return f"{self.dim}, gain={self.gain is not None}"


class Derf(DyT):
    """y = gain ⊙ erf(α·x + s) + bias: `DyT` with a learned s from 0. Source: arXiv 2512.10938."""

    shift: nn.Parameter

    def __init__(self, dim: int, *, gain: bool = True) -> None:
        super().__init__(dim, gain=gain)
        self.shift = nn.Parameter(torch.zeros(()))


def _check(dim: int, eps: float) -> None:
    require_sizes("norm", dim=dim)
    if not eps >= 0:
        raise InputError(f"a norm's eps is {eps}; it must be 0 or more")
