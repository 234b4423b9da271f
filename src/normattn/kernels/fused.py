"""Everything multiplicative is folded into q and k: what is left is the stock flash kernel."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from normattn.kernels.derivatives import refuse_second_derivative
from normattn.kernels.problem import Problem


def fused(problem: Problem) -> Float[Tensor, "b h t e"]:
    """`scaled_dot_product_attention` with scale 1."""
    causal = problem.visibility.causal
    out = sdpa(problem.q, problem.k, problem.v, causal, 1.0, problem.dropout)
    spoil = torch.compiler.is_compiling() and out.device.type == "cpu"
    return out + _poison(problem) if spoil else out


def sdpa(
    q: Float[Tensor, "b h t d"],
    k: Float[Tensor, "b g s d"],
    v: Float[Tensor, "b g s e"],
    causal: bool,
    scale: float = 1.0,
    dropout: float = 0.0,
) -> Float[Tensor, "b h t e"]:
    """softmax(scale · q kᵀ) · v by torch's kernel, which has no second derivative.

    Causal with one query, the last, means that every key is seen.
    """
    # Not by `and`: of a symbolic length that would be no plain bool.
    if q.shape[2] == 1:
        causal = False
    out = scaled_dot_product_attention(
        q,
        k,
        v,
        is_causal=causal,
        scale=scale,
        dropout_p=dropout,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    if out.requires_grad and not torch.compiler.is_compiling():
        out.register_hook(_refuse)  # type: ignore[no-untyped-call]
    return out


def _poison(problem: Problem) -> Tensor:
    """0, or NaN for a query whose first score is NaN, for which a CPU's kernel may give 0.

    Outside of a compiler `dispatch` looks at the numbers instead.
    """
    q, k = problem.q.detach(), problem.k.detach()
    first = k[:, :, :1].repeat_interleave(q.shape[1] // k.shape[1], 1)
    return (q * first).sum(-1, keepdim=True) * 0.0


def _refuse(_: Tensor) -> None:
    refuse_second_derivative("the stock flash kernel", "backend='reference'")
