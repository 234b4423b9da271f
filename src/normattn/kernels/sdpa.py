"""torch's attention kernels: `scaled_dot_product_attention` and the flash operators for CPUs.

The flash operators are called directly because they return the log-sum-exp. They assume that an
operand's last axis is dense and do not check it. Strided slices and expanded axes would be read out
of bounds, so `flash` copies such operands.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from normattn.kernels.inputs import AttentionInputs
from normattn.kernels.numerics import refuse_second_derivative
from normattn.plain import traced

# Read at import, since a compiler cannot trace the call.
PROCESSOR_FEATURES: Mapping[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()
"""Whether the processor has a feature, by torch's name for it."""
_FAST_HALF_DTYPES = tuple(
    dtype
    for dtype, name in ((torch.bfloat16, "amx_bf16"), (torch.float16, "amx_fp16"))
    if PROCESSOR_FEATURES.get(name)
)

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def fused(inputs: AttentionInputs) -> Float[Tensor, "b h t e"]:
    """`scaled_dot_product_attention` with scale 1."""
    q, k = inputs.q, inputs.k
    out = sdpa(q, k, inputs.v, inputs.mask.causal, 1.0, inputs.dropout)
    if not traced() or out.device.type != "cpu":
        return out
    # The CPU kernel may return 0 for a query whose first score is NaN, so add 0 or NaN. Without
    # tracing, `dispatch` checks the numbers instead.
    first = k.detach()[:, :, :1].repeat_interleave(q.shape[1] // k.shape[1], 1)
    return out + (q.detach() * first).sum(-1, keepdim=True) * 0.0


def sdpa(
    q: Float[Tensor, "b h t d"],
    k: Float[Tensor, "b g s d"],
    v: Float[Tensor, "b g s e"],
    causal: bool,
    scale: float = 1.0,
    dropout: float = 0.0,
) -> Float[Tensor, "b h t e"]:
    """softmax(scale · q kᵀ) · v by torch's kernel; a single causal query sees every key."""
    shape, dtype, grouped = q.shape, v.dtype, q.shape[1] != k.shape[1]
    if q.element_size() == 2 and is_slow_dtype(q):
        q, k, v = q.float(), k.float(), v.float()
    # An `if`, since `causal and …` with a symbolic length would not be a bool.
    if q.shape[2] == 1:
        causal = False
        if grouped:
            # Query heads that share a key head become rows, so that each key is read once.
            q = q.reshape(shape[0], k.shape[1], -1, shape[3])
    out = scaled_dot_product_attention(
        *(q, k, v),
        is_causal=causal,
        scale=scale,
        dropout_p=dropout,
        enable_gqa=q.shape[1] != k.shape[1],
    ).to(dtype)
    out = out.reshape(*shape[:3], v.shape[3]) if grouped else out
    if out.requires_grad and not torch.compiler.is_compiling():
        out.register_hook(_refuse_second_derivative)  # type: ignore[no-untyped-call]
    return out


def _refuse_second_derivative(_: Tensor) -> None:
    refuse_second_derivative("the stock flash kernel", "backend='reference'")


def is_slow_dtype(q: Float[Tensor, "b h t d"]) -> bool:
    """Whether torch's kernel is faster in float32 than in the half precision of these queries.

    Scores are in float32 either way. On a CPU with AVX-512 and without AMX a forward in bfloat16
    took 1.6 times as long as in float32, and a backward twice as long; on another, the same and
    0.8 times as long. torch names no feature that tells the two apart. A single query is excluded:
    converting all keys would take longer than attending to them.
    """
    if q.device.type != "cpu" or q.element_size() != 2 or q.shape[2] == 1:
        return False
    return q.dtype not in _FAST_HALF_DTYPES


def dense(x: Float[Tensor, "b h t d"]) -> Float[Tensor, "b h t d"]:
    """`x`, or a copy if its rows are not dense or overlap."""
    dense_rows = x.stride(-1) == 1 and x.stride(-2) >= x.shape[-1]
    return x if dense_rows else x.contiguous()


def flash(
    q: Float[Tensor, "b h t d"],
    k: Float[Tensor, "b g s d"],
    v: Float[Tensor, "b g s d"],
    causal: bool,
    mask: Float[Tensor, "*b t s"] | None = None,
    scale: float = 1.0,
) -> tuple[Float[Tensor, "b h t d"], Float[Tensor, "b h t"]]:
    """softmax(scale · q kᵀ + mask) · v and the log-sum-exp of each row, in float32 or wider."""
    mask = mask if mask is None or mask.dim() == 4 else mask[None, None]
    out, lse = _forward(dense(q), dense(k), dense(v), 0.0, causal, attn_mask=mask, scale=scale)
    return out, lse


def flash_backward(
    grad_out: Float[Tensor, "b h t d"],
    q: Float[Tensor, "b h t d"],
    k: Float[Tensor, "b g s d"],
    v: Float[Tensor, "b g s d"],
    out: Float[Tensor, "b h t d"],
    lse: Float[Tensor, "b h t"],
    causal: bool,
    mask: Float[Tensor, "t s"] | None = None,
) -> tuple[Float[Tensor, "b h t d"], Float[Tensor, "b g s d"], Float[Tensor, "b g s d"]]:
    """The gradients of q, k and v, from the gradient of `flash`'s output."""
    operands = (*(dense(x) for x in (grad_out, q, k, v, out)), lse.contiguous())
    mask = None if mask is None else mask[None, None]
    grad_q, grad_k, grad_v = _backward(*operands, 0.0, causal, attn_mask=mask, scale=1.0)
    return grad_q, grad_k, grad_v
