"""Residual connections and norms around a sub-layer f, as modules that wrap it.

In each, `dropout` acts on f's output in training, and `forward` passes further arguments to f.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from normattn.errors import require_sizes
from normattn.kernels.numerics import at_least_float32


class ResidualConnection(nn.Module):
    """Base class of a sub-layer f with an optional norm N and dropout."""

    def __init__(
        self, sublayer: nn.Module, norm: nn.Module | None = None, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.sublayer, self.norm, self.dropout = sublayer, norm, dropout

    def normed(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        """N(x), or x without a norm."""
        return x if self.norm is None else self.norm(x)

    def branch(self, x: Float[Tensor, "b t d"], context: dict[str, Any]) -> Float[Tensor, "b t d"]:
        """f(x) with dropout."""
        y: Tensor = self.sublayer(x, **context)
        return F.dropout(y, self.dropout) if self.training and self.dropout > 0 else y

    def extra_repr(self) -> str:
        """Name the settings in the printed module."""
        return ", ".join(f"{n}={x:.6g}" for n, x in vars(self).items() if n in ("alpha", "block"))


class PreLN(ResidualConnection):
    """x + f(N(x)). The stack needs one more norm after its last block. Source: arXiv 2002.04745."""

    def forward(self, x: Float[Tensor, "b t d"], **context: Any) -> Float[Tensor, "b t d"]:
        """Add the sub-layer's output to `x`."""
        return x + self.branch(self.normed(x), context)


class PostLN(ResidualConnection):
    """N(x + f(x)), the first Transformer's. Source: arXiv 1706.03762."""

    def forward(self, x: Float[Tensor, "b t d"], **context: Any) -> Float[Tensor, "b t d"]:
        """Add the sub-layer's output to `x` and normalise the sum."""
        return self.normed(x + self.branch(x, context))


class DeepNorm(ResidualConnection):
    """N(α·x + f(x)), with α from `deepnorm_factors`. Source: arXiv 2203.00555."""

    def __init__(
        self, sublayer: nn.Module, norm: nn.Module, alpha: float, dropout: float = 0.0
    ) -> None:
        super().__init__(sublayer, norm, dropout)
        self.alpha = alpha

    def forward(self, x: Float[Tensor, "b t d"], **context: Any) -> Float[Tensor, "b t d"]:
        """Add the sub-layer's output to α·x and normalise the sum."""
        return self.normed(torch.add(self.branch(x, context), x, alpha=self.alpha))


class ReZero(ResidualConnection):
    """x + α·f(N(x)) with one learned number α, which begins at 0: a block begins as the identity.

    `norm=None` leaves N out. Source: arXiv 2003.04887; kexue 8027.
    """

    def __init__(
        self, sublayer: nn.Module, norm: nn.Module | None = None, dropout: float = 0.0
    ) -> None:
        super().__init__(sublayer, norm, dropout)
        self.alpha = nn.Parameter(torch.zeros(()))

    def forward(self, x: Float[Tensor, "b t d"], **context: Any) -> Float[Tensor, "b t d"]:
        """Add α times the sub-layer's output to `x`."""
        return x + self.alpha * self.branch(self.normed(x), context)


class NGPT(ResidualConnection):
    """N(x + |α|⊙(N(f(x)) − x)): a step on the sphere from x towards the sub-layer's output.

    N has no gain. α is learned for each feature and begins at 0.05; its parameter is α in units
    of 0.05·√dim, as in the authors' code. The embedding is normalised too; the stack's output is
    not normalised again. The authors also normalise the weights after each optimiser step, which
    training does with `unit_weights`. Their learned scales of hidden features and logits are left
    out. Source: arXiv 2410.01131; github.com/NVIDIA/ngpt.
    """

    def __init__(
        self, sublayer: nn.Module, norm: nn.Module, dim: int, dropout: float = 0.0
    ) -> None:
        super().__init__(sublayer, norm, dropout)
        self.alpha = nn.Parameter(torch.full((dim,), dim**-0.5))

    def forward(self, x: Float[Tensor, "b t d"], **context: Any) -> Float[Tensor, "b t d"]:
        """Move `x` towards the sub-layer's output and normalise it."""
        step = (self.alpha * (0.05 * self.alpha.numel() ** 0.5)).abs().to(x.dtype)
        end = self.normed(self.branch(x, context)).to(x.dtype)  # autocast leaves it in bfloat16
        return self.normed(torch.lerp(x, end, step))


class FixedScale(ResidualConnection):
    """x + ε·f(x) with ε = 0.1 and no norm. Source: kexue 8027."""

    def forward(self, x: Float[Tensor, "b t d"], **context: Any) -> Float[Tensor, "b t d"]:
        """Add ε times the sub-layer's output to `x`."""
        return torch.add(x, self.branch(x, context), alpha=0.1)


class LayerOutputs(NamedTuple):
    """The outputs of the sub-layers so far, which `AttnRes` has instead of a residual stream.

    `sums` holds the embedding v_0 and then, for each block of sub-layers, the sum of their outputs;
    the last block may be incomplete. `sublayers` counts the sub-layers that have run.
    """

    sums: tuple[Float[Tensor, "b t d"], ...]
    sublayers: int = 0

    def mixed(self, query: Float[Tensor, "d"], eps: float) -> Float[Tensor, "b t d"]:
        """Σ_i α_i·v_i over all sums, with α = softmax_i ⟨w, v_i/rms(v_i)⟩ for each token."""
        logits = []
        for v in self.sums:
            x = v.to(at_least_float32(v.dtype))
            inverse_rms = torch.rsqrt(x.square().mean(-1) + eps)
            logits.append((x * query.to(x.dtype)).sum(-1) * inverse_rms)
        weights = torch.stack(logits).softmax(0)[..., None].to(self.sums[0].dtype)
        mixture = weights[0] * self.sums[0]
        for weight, v in zip(weights[1:], self.sums[1:], strict=True):
            mixture = mixture + weight * v
        return mixture


class AttnRes(ResidualConnection):
    """f(N(h)), h = Σ_i α_i·v_i: attention over the outputs of the sub-layers below, not their sum.

    v_0 is the embedding and v_i the output of sub-layer i, or the sum of the outputs of a `block`
    of sub-layers. α = softmax_i ⟨w, v_i/rms(v_i)⟩ with a learned vector w for each sub-layer. w
    begins at 0, the mean of all. The stack's output is such a mixture with its own w. Source:
    Attention Residuals, arXiv 2603.15031; kexue 11664.
    """

    def __init__(
        self,
        sublayer: nn.Module,
        norm: nn.Module,
        dim: int,
        dropout: float = 0.0,
        *,
        block: int = 1,
        eps: float = 1e-6,
    ) -> None:
        super().__init__(sublayer, norm, dropout)
        require_sizes("AttnRes", block=block)
        self.query = nn.Parameter(torch.zeros(dim))
        self.block, self.eps = block, eps

    def forward(self, x: LayerOutputs, **context: Any) -> LayerOutputs:
        """Append the sub-layer's output to those that later sub-layers attend to."""
        output = self.branch(self.normed(x.mixed(self.query, self.eps)), context)
        sums = (*x.sums, output)
        if x.sublayers % self.block:  # not the first of its block
            sums = (*x.sums[:-1], x.sums[-1] + output)
        return LayerOutputs(sums, x.sublayers + 1)


def deepnorm_factors(blocks: int, sublayers: int = 2) -> tuple[float, float]:
    """DeepNorm's α = M^¼ and β = (4M)^−¼ for M = blocks · sublayers sub-layers.

    The paper keeps Σ (v² + w²)/α² at 1, with v and w the scales of a sub-layer's two weights: for
    blocks of two that gives its (2N)^¼ and (8N)^−¼. A gated attention unit is one sub-layer.
    Raises `InputError` below one block or sub-layer. Source: arXiv 2203.00555, section 3.
    """
    require_sizes("DeepNorm", blocks=blocks, sublayers=sublayers)
    depth = blocks * sublayers
    return depth**0.25, (4 * depth) ** -0.25
