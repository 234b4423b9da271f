"""Where the residual and the norm of a sub-layer f stand, as modules that wrap the sub-layer.

In each, `dropout` acts on f's output in training, and further arguments of `forward` go to f.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from normattn.errors import InputError


class Placed(nn.Module):
    """A sub-layer with its norm, if any, and dropout; what they make of x is a subclass's."""

    def __init__(
        self, sublayer: nn.Module, norm: nn.Module | None = None, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.sublayer = sublayer
        self.norm = norm
        self.dropout = dropout

    def normed(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        """N(x), or x without a norm."""
        return x if self.norm is None else self.norm(x)

    def branch(self, x: Float[Tensor, "b t d"], context: dict[str, Any]) -> Float[Tensor, "b t d"]:
        """f(x) with dropout."""
        y: Tensor = self.sublayer(x, **context)
        return F.dropout(y, self.dropout) if self.training and self.dropout > 0 else y


class PreLN(Placed):
    """x + f(N(x)). The stack needs one more norm after its last block. Source: arXiv 2002.04745."""

    def forward(self, x: Float[Tensor, "b t d"], **context: Any) -> Float[Tensor, "b t d"]:
        """Add the sub-layer's output to `x`."""
        return x + self.branch(self.normed(x), context)


class PostLN(Placed):
    """N(x + f(x)), the first Transformer's. Source: arXiv 1706.03762."""

    def forward(self, x: Float[Tensor, "b t d"], **context: Any) -> Float[Tensor, "b t d"]:
        """Add the sub-layer's output to `x` and normalise the sum."""
        return self.normed(x + self.branch(x, context))


class DeepNorm(Placed):
    """N(α·x + f(x)); α, and β for the initialisation, from `deepnorm_factors`.

    Source: arXiv 2203.00555.
    """

    def __init__(
        self, sublayer: nn.Module, norm: nn.Module, alpha: float, dropout: float = 0.0
    ) -> None:
        super().__init__(sublayer, norm, dropout)
        if not alpha > 0:
            raise InputError(f"DeepNorm's α is {alpha}; it must be above 0")
        self.alpha = alpha

    def forward(self, x: Float[Tensor, "b t d"], **context: Any) -> Float[Tensor, "b t d"]:
        """Add the sub-layer's output to α·x and normalise the sum."""
        return self.normed(torch.add(self.branch(x, context), x, alpha=self.alpha))

    def extra_repr(self) -> str:
        """Name the settings in the printed module."""
        return f"alpha={self.alpha:.6g}"


class ReZero(Placed):
    """x + α·f(N(x)) with one learned number α, 0 at the start, so that a block begins as x → x.

    `norm=None` leaves the inner norm out. `start` is α's first value. Source: arXiv 2003.04887;
    kexue 8027.
    """

    def __init__(
        self,
        sublayer: nn.Module,
        norm: nn.Module | None = None,
        dropout: float = 0.0,
        *,
        start: float = 0.0,
    ) -> None:
        super().__init__(sublayer, norm, dropout)
        self.alpha = nn.Parameter(torch.full((), start))

    def forward(self, x: Float[Tensor, "b t d"], **context: Any) -> Float[Tensor, "b t d"]:
        """Add α times the sub-layer's output to `x`."""
        return x + self.alpha * self.branch(self.normed(x), context)


class FixedScale(Placed):
    """x + ε·f(x) with a fixed ε and no norm at all; the source's ε is 0.1. Source: kexue 8027."""

    def __init__(self, sublayer: nn.Module, scale: float = 0.1, dropout: float = 0.0) -> None:
        super().__init__(sublayer, None, dropout)
        if not scale > 0:
            raise InputError(f"the fixed scale of a branch is {scale}; it must be above 0")
        self.scale = scale

    def forward(self, x: Float[Tensor, "b t d"], **context: Any) -> Float[Tensor, "b t d"]:
        """Add ε times the sub-layer's output to `x`."""
        return torch.add(x, self.branch(x, context), alpha=self.scale)

    def extra_repr(self) -> str:
        """Name the settings in the printed module."""
        return f"scale={self.scale:.6g}"


def deepnorm_factors(blocks: int, sublayers: int = 2) -> tuple[float, float]:
    """DeepNorm's α = M^¼ and β = (4M)^−¼ for M = blocks · sublayers sub-layers.

    The paper bounds how far one update moves the output by Σ (v² + w²)/α² over the sub-layers, with
    v and w the scales of a sub-layer's two weights, and keeps it at 1 with v = w = β. For blocks of
    two that is its (2N)^¼ and (8N)^−¼. A gated attention unit is one sub-layer, with β on its value
    columns and its output weight; its gate, a third factor at scale 1, adds ¼·N^−½ to the bound.
    Raises `InputError` below one block or sub-layer. Source: arXiv 2203.00555, section 3.
    """
    if blocks < 1 or sublayers < 1:
        raise InputError(
            f"DeepNorm over {blocks} blocks of {sublayers} sub-layers was asked for; "
            "both must be at least 1"
        )
    depth = blocks * sublayers
    return depth**0.25, (4 * depth) ** -0.25
