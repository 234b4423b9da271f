"""LayerNorm and RMSNorm over the last axis, with every choice that families differ in explicit."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from normattn.errors import InputError
from normattn.score.norms import rms_norm, wide

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
        dtype = wide(x.dtype)
        rows = x.to(dtype)
        gain = None if self.gain is None else self.gain.to(dtype)
        bias = None if self.bias is None else self.bias.to(dtype)
        return F.layer_norm(rows, (self.dim,), gain, bias, self.eps).to(x.dtype)

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
        if self.eps_placement == "inside":
            return rms_norm(x, self.gain, self.eps)
        rows = x.to(wide(x.dtype))
        gain = None if self.gain is None else self.gain.to(rows.dtype)
        rms = torch.linalg.vector_norm(rows, dim=-1, keepdim=True) * float(self.dim**-0.5)
        normal: Tensor = rows / (rms + self.eps)
        return (normal if gain is None else normal * gain).to(x.dtype)

    def extra_repr(self) -> str:
        """Name the settings in the printed module."""
        return (
            f"{self.dim}, eps={self.eps}, gain={self.gain is not None}, "
            f"eps_placement={self.eps_placement!r}"
        )


def _check(dim: int, eps: float) -> None:
    if dim < 1:
        raise InputError(f"a norm over {dim} features was asked for; the width must be at least 1")
    if not eps >= 0:
        raise InputError(f"a norm's eps is {eps}; it must be 0 or more")
