"""Where the residual and the norm of a sub-layer stand, as modules that wrap the sub-layer."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from normattn.errors import InputError


class PreLN(nn.Module):
    """x + f(N(x)). The stack needs one more norm after its last block. Source: arXiv 2002.04745.

    `dropout` acts on f's output in training. Further arguments of `forward` go to f.
    """

    def __init__(self, sublayer: nn.Module, norm: nn.Module, dropout: float = 0.0) -> None:
        super().__init__()
        self.sublayer = sublayer
        self.norm = norm
        self.dropout = dropout

    def forward(self, x: Float[Tensor, "b t d"], **context: Any) -> Float[Tensor, "b t d"]:
        """Add the sub-layer's output to `x`."""
        return x + _drop(self, self.sublayer(self.norm(x), **context))


class PostLN(nn.Module):
    """N(x + f(x)), the first Transformer's. Source: arXiv 1706.03762.

    `dropout` acts on f's output in training. Further arguments of `forward` go to f.
    """

    def __init__(self, sublayer: nn.Module, norm: nn.Module, dropout: float = 0.0) -> None:
        super().__init__()
        self.sublayer = sublayer
        self.norm = norm
        self.dropout = dropout

    def forward(self, x: Float[Tensor, "b t d"], **context: Any) -> Float[Tensor, "b t d"]:
        """Add the sub-layer's output to `x` and normalise the sum."""
        y: Tensor = self.norm(x + _drop(self, self.sublayer(x, **context)))
        return y


class DeepNorm(nn.Module):
    """N(α·x + f(x)); α, and β for the initialisation, from `deepnorm_factors`.

    `dropout` acts on f's output in training. Further arguments of `forward` go to f. Source:
    arXiv 2203.00555.
    """

    def __init__(
        self, sublayer: nn.Module, norm: nn.Module, alpha: float, dropout: float = 0.0
    ) -> None:
        super().__init__()
        if not alpha > 0:
            raise InputError(f"DeepNorm's α is {alpha}; it must be above 0")
        self.sublayer = sublayer
        self.norm = norm
        self.alpha = alpha
        self.dropout = dropout

    def forward(self, x: Float[Tensor, "b t d"], **context: Any) -> Float[Tensor, "b t d"]:
        """Add the sub-layer's output to α·x and normalise the sum."""
        branch = _drop(self, self.sublayer(x, **context))
        y: Tensor = self.norm(torch.add(branch, x, alpha=self.alpha))
        return y

    def extra_repr(self) -> str:
        """Name the settings in the printed module."""
        return f"alpha={self.alpha:.6g}"


class ReZero(nn.Module):
    """x + α·f(N(x)) with one learned number α, 0 at the start, so that a block begins as x → x.

    `norm=None` leaves the inner norm out. `start` is α's first value. `dropout` acts on f's
    output in training. Further arguments of `forward` go to f. Source: arXiv 2003.04887;
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
        super().__init__()
        self.sublayer = sublayer
        self.norm = norm
        self.alpha = nn.Parameter(torch.full((), start))
        self.dropout = dropout

    def forward(self, x: Float[Tensor, "b t d"], **context: Any) -> Float[Tensor, "b t d"]:
        """Add α times the sub-layer's output to `x`."""
        inner = x if self.norm is None else self.norm(x)
        return x + self.alpha * _drop(self, self.sublayer(inner, **context))


class FixedScale(nn.Module):
    """x + ε·f(x) with a fixed ε and no norm at all; the source's ε is 0.1.

    `dropout` acts on f's output in training. Further arguments of `forward` go to f. Source:
    kexue 8027.
    """

    def __init__(self, sublayer: nn.Module, scale: float = 0.1, dropout: float = 0.0) -> None:
        super().__init__()
        if not scale > 0:
            raise InputError(f"the fixed scale of a branch is {scale}; it must be above 0")
        self.sublayer = sublayer
        self.scale = scale
        self.dropout = dropout

    def forward(self, x: Float[Tensor, "b t d"], **context: Any) -> Float[Tensor, "b t d"]:
        """Add ε times the sub-layer's output to `x`."""
        return torch.add(x, _drop(self, self.sublayer(x, **context)), alpha=self.scale)

    def extra_repr(self) -> str:
        """Name the settings in the printed module."""
        return f"scale={self.scale:.6g}"


def deepnorm_factors(blocks: int, sublayers: int = 2) -> tuple[float, float]:
    """DeepNorm's (α, β) for a stack of `blocks` blocks of `sublayers` sub-layers each.

    The paper bounds how far one update moves the output by the sum over the M = blocks ·
    sublayers sub-layers of (v² + w²)/α², where v and w are the scales of a sub-layer's two
    weights, and asks that it stay constant with v = w = β. For blocks of two sub-layers, M = 2N:
    α = (2N)^¼ and β = (8N)^−¼, which is α = M^¼ and β = (4M)^−¼; the bound is then
    M · 2β²/α² = 1. A gated attention unit is one sub-layer a block, M = N: α = N^¼ and
    β = (4N)^−¼, with β on its value columns and its output weight. Its gate u is a third factor;
    left at scale 1 it keeps the signal's size, and its own update adds N·β⁴/α² = ¼·N^−½ to the
    bound, which vanishes with depth. Raises `InputError` below one block or sub-layer. Source:
    arXiv 2203.00555, section 3.
    """
    if blocks < 1 or sublayers < 1:
        raise InputError(
            f"DeepNorm over {blocks} blocks of {sublayers} sub-layers was asked for; "
            "both must be at least 1"
        )
    depth = blocks * sublayers
    return depth**0.25, (4 * depth) ** -0.25


def _drop(module: PreLN | PostLN | DeepNorm | ReZero | FixedScale, branch: Tensor) -> Tensor:
    if module.training and module.dropout > 0:
        return F.dropout(branch, module.dropout)
    return branch
