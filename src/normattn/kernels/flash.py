"""torch's flash operators for a CPU, asked directly because they hand out the log-sum-exp.

They walk along an operand's last axis as if it were dense and say nothing where it is not: what a
Conv1d gives, a slice with a step or an expanded axis would be read out of bounds. So every operand
comes here first.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def dense(x: Float[Tensor, "b h t d"]) -> Float[Tensor, "b h t d"]:
    """`x`, copied where the numbers of a row do not lie side by side, or rows upon each other."""
    whole = x.stride(-1) == 1 and x.stride(-2) >= x.shape[-1]
    return x if whole else x.contiguous()


def flash(
    q: Float[Tensor, "b h t d"],
    k: Float[Tensor, "b g s d"],
    v: Float[Tensor, "b g s d"],
    causal: bool,
    mask: Float[Tensor, "t s"] | None = None,
) -> tuple[Float[Tensor, "b h t d"], Float[Tensor, "b h t"]]:
    """softmax(q kᵀ + mask) · v and the log-sum-exp of each row, in float32 or wider."""
    mask = None if mask is None else mask[None, None]
    out, sums = _forward(dense(q), dense(k), dense(v), 0.0, causal, attn_mask=mask, scale=1.0)
    return out, sums


def flash_backward(
    by_out: Float[Tensor, "b h t d"],
    q: Float[Tensor, "b h t d"],
    k: Float[Tensor, "b g s d"],
    v: Float[Tensor, "b g s d"],
    out: Float[Tensor, "b h t d"],
    sums: Float[Tensor, "b h t"],
    causal: bool,
    mask: Float[Tensor, "t s"] | None = None,
) -> tuple[Float[Tensor, "b h t d"], Float[Tensor, "b g s d"], Float[Tensor, "b g s d"]]:
    """The gradients of q, k and v from those of `flash`'s output."""
    operands = (dense(x) for x in (by_out, q, k, v, out))
    mask = None if mask is None else mask[None, None]
    by_q, by_k, by_v = _backward(
        *operands, sums.contiguous(), 0.0, causal, attn_mask=mask, scale=1.0
    )
    return by_q, by_k, by_v
