"""Feed-forward sub-layers: SwiGLU and GELU, both without biases by default."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from normattn.errors import InputError
from normattn.plain import use_plain_ops

# Rows that a gated layer maps at a time without gradient: what lies between its products then stays
# in a core's cache. A multiple of what a product computes side by side, so that no digit changes.
_ROWS = 512


def swiglu_hidden(dim: int, multiple: int = 16) -> int:
    """8/3 · `dim`, which gives SwiGLU the parameters of a 4 · `dim` layer, to the nearest multiple.

    At least one multiple. 256 → 688, 768 → 2048.
    """
    return max(multiple, round(8 * dim / (3 * multiple)) * multiple)


class SwiGLU(nn.Module):
    """Gated feed-forward: W_down(silu(x W_gate) ⊙ x W_up), gate and up in one matmul.

    Shapes: (..., dim) → (..., dim). `hidden` defaults to `swiglu_hidden(dim)`. The weight of
    `up` holds the gate's rows first. Raises `InputError` for a width below 1. Source: arXiv
    2002.05202.
    """

    def __init__(self, dim: int, hidden: int | None = None, *, bias: bool = False) -> None:
        super().__init__()
        self.hidden = _checked(dim, swiglu_hidden(dim) if hidden is None else hidden)
        self.up = nn.Linear(dim, 2 * self.hidden, bias=bias)
        self.down = nn.Linear(self.hidden, dim, bias=bias)

    def forward(self, x: Float[Tensor, "... dim"]) -> Float[Tensor, "... dim"]:
        """Map each position by itself."""
        if torch.is_grad_enabled() or use_plain_ops() or x.device.type != "cpu":
            return self._map(x)
        rows = x.reshape(-1, x.shape[-1])
        # The last part takes the rest, as products of few rows round otherwise.
        whole = max(0, len(rows) // _ROWS - 1)
        parts = torch.split(rows, [*[_ROWS] * whole, len(rows) - _ROWS * whole])
        mapped = [self._map(part) for part in parts]
        return (mapped[0] if len(mapped) == 1 else torch.cat(mapped)).view(x.shape)

    def _map(self, x: Tensor) -> Tensor:
        both = self.up(x)
        if use_plain_ops():
            gate, up = both.chunk(2, dim=-1)
            y: Tensor = self.down(F.silu(gate) * up)
        else:
            y = self.down(_GatedSiLU.apply(both))  # type: ignore[no-untyped-call]
        return y


class GELU(nn.Module):
    """Feed-forward: W_down(gelu(x W_up)), the exact GELU.

    Shapes: (..., dim) → (..., dim). `hidden` defaults to 4 · dim. Raises `InputError` for a
    width below 1. Source: arXiv 1606.08415.
    """

    def __init__(self, dim: int, hidden: int | None = None, *, bias: bool = False) -> None:
        super().__init__()
        self.hidden = _checked(dim, 4 * dim if hidden is None else hidden)
        self.up = nn.Linear(dim, self.hidden, bias=bias)
        self.down = nn.Linear(self.hidden, dim, bias=bias)

    def forward(self, x: Float[Tensor, "... dim"]) -> Float[Tensor, "... dim"]:
        """Map each position by itself."""
        y: Tensor = self.down(F.gelu(self.up(x)))
        return y


class _GatedSiLU(torch.autograd.Function):
    """silu(gate) ⊙ up of one packed tensor; keeps only that and writes one packed gradient.

    Plain autograd keeps silu(gate) as well and joins the two halves of the gradient by a copy.
    """

    @staticmethod
    def forward(ctx: Any, both: Tensor) -> Tensor:
        ctx.save_for_backward(both)
        gate, up = both.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (both,) = ctx.saved_tensors
        gate, up = both.chunk(2, dim=-1)
        grad_both = torch.empty_like(both)
        grad_gate, grad_up = grad_both.chunk(2, dim=-1)
        torch.mul(F.silu(gate), grad, out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
        return grad_both


def _checked(dim: int, hidden: int) -> int:
    if dim < 1 or hidden < 1:
        raise InputError(
            f"a feed-forward layer of width {dim} and hidden width {hidden} was asked for; "
            "both must be at least 1"
        )
    return hidden
