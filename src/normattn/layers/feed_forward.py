"""Feed-forward layers without biases: SwiGLU and GELU."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from normattn.errors import require_sizes
from normattn.layers.checks import check_input
from normattn.plain import use_plain_ops


def swiglu_hidden(dim: int) -> int:
    """8/3 · `dim`, rounded to 16: as many parameters as a GELU layer of 4 · `dim`."""
    return max(16, round(8 * dim / 48) * 16)


class SwiGLU(nn.Module):
    """Gated feed-forward: W_down(silu(x W_gate) ⊙ x W_up), gate and up in one matmul.

    Shapes: (..., dim) → (..., dim). `hidden` defaults to `swiglu_hidden(dim)`. The weight of
    `up` holds the gate's rows first. Raises `InputError` for a width below 1. Source: arXiv
    2002.05202.
    """

    def __init__(self, dim: int, hidden: int | None = None) -> None:
        super().__init__()
        self.hidden = swiglu_hidden(dim) if hidden is None else hidden
        require_sizes("feed-forward", dim=dim, hidden=self.hidden)
        self.up = nn.Linear(dim, 2 * self.hidden, bias=False)
        self.down = nn.Linear(self.hidden, dim, bias=False)

    def forward(self, x: Float[Tensor, "... dim"]) -> Float[Tensor, "... dim"]:
        """Apply the layer to each position."""
        check_input("a feed-forward layer's input", x, self.up.in_features, axes=None)
        gate_up = self.up(x)
        if use_plain_ops():
            gate, up = gate_up.chunk(2, dim=-1)
            y: Tensor = self.down(F.silu(gate) * up)
        else:
            y = self.down(_GatedSiLU.apply(gate_up))  # type: ignore[no-untyped-call]
        return y


class GELU(nn.Module):
    """Feed-forward: W_down(gelu(x W_up)), the exact GELU.

    Shapes: (..., dim) → (..., dim). `hidden` defaults to 4 · dim. Raises `InputError` for a
    width below 1. Source: arXiv 1606.08415.
    """

    def __init__(self, dim: int, hidden: int | None = None) -> None:
        super().__init__()
        self.hidden = 4 * dim if hidden is None else hidden
        require_sizes("feed-forward", dim=dim, hidden=self.hidden)
        self.up = nn.Linear(dim, self.hidden, bias=False)
        self.down = nn.Linear(self.hidden, dim, bias=False)

    def forward(self, x: Float[Tensor, "... dim"]) -> Float[Tensor, "... dim"]:
        """Apply the layer to each position."""
        check_input("a feed-forward layer's input", x, self.up.in_features, axes=None)
        y: Tensor = self.down(F.gelu(self.up(x)))
        return y


class _GatedSiLU(torch.autograd.Function):
    """silu(gate) ⊙ up; saves memory by one packed gradient and not keeping silu(gate)."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        grad_gate_up = torch.empty_like(gate_up)
        grad_gate, grad_up = grad_gate_up.chunk(2, dim=-1)
        torch.mul(F.silu(gate), grad, out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
        return grad_gate_up
