"""torch's own attention kernels: what is absorbed into q and k, and a CPU's flash operators.

The flash operators are called directly because they give the log-sum-exp. They walk along an
operand's last axis as if it were dense and say nothing where it is not: what a Conv1d gives, a
slice with a step or an expanded axis would be read out of bounds. So `flash` copies such operands.
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

# Read once, here: a compiler does not trace the question.
PROCESSOR_FEATURES: Mapping[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()
"""What the processor has, by torch's names."""
_QUICK_TYPES = tuple(
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
    # A CPU's kernel may give 0 for a query whose first score is NaN: add 0, or NaN. Outside of
    # tracing `dispatch` looks at the numbers instead.
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
    """softmax(scale · q kᵀ) · v by torch's kernel, which has no second derivative.

    Causal with one query, the last, means that every key is visible.
    """
    shape, dtype, shared = q.shape, v.dtype, q.shape[1] != k.shape[1]
    if q.element_size() == 2 and slow_type(q):
        q, k, v = q.float(), k.float(), v.float()
    # Not by `and`: of a symbolic length that would be no plain bool.
    if q.shape[2] == 1:
        causal = False
        if shared:
            # Query heads that share a key head become rows: each key is read once.
            q = q.reshape(shape[0], k.shape[1], -1, shape[3])
    out = scaled_dot_product_attention(
        *(q, k, v),
        is_causal=causal,
        scale=scale,
        dropout_p=dropout,
        enable_gqa=q.shape[1] != k.shape[1],
    ).to(dtype)
    out = out.reshape(*shape[:3], -1) if shared else out
    if out.requires_grad and not torch.compiler.is_compiling():
        out.register_hook(_refuse)  # type: ignore[no-untyped-call]
    return out


def _refuse(_: Tensor) -> None:
    refuse_second_derivative("the stock flash kernel", "backend='reference'")


def slow_type(q: Float[Tensor, "b h t d"]) -> bool:
    """Whether torch's kernel is quicker in float32 than in the half precision of these queries.

    It keeps scores in float32 either way. On a CPU with AVX-512 and without AMX a forward in
    bfloat16 takes 1.6 times as long as one in float32, and a backward twice as long. A single query
    reads its keys once: to widen them would take longer than to attend.
    """
    if q.device.type != "cpu" or q.element_size() != 2 or q.shape[2] == 1:
        return False
    return q.dtype not in _QUICK_TYPES


def dense(x: Float[Tensor, "b h t d"]) -> Float[Tensor, "b h t d"]:
    """`x`, copied where the numbers of a row do not lie side by side, or rows upon each other."""
    whole = x.stride(-1) == 1 and x.stride(-2) >= x.shape[-1]
    return x if whole else x.contiguous()


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
    out, sums = _forward(dense(q), dense(k), dense(v), 0.0, causal, attn_mask=mask, scale=scale)
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
    operands = (*(dense(x) for x in (by_out, q, k, v, out)), sums.contiguous())
    mask = None if mask is None else mask[None, None]
    by_q, by_k, by_v = _backward(*operands, 0.0, causal, attn_mask=mask, scale=1.0)
    return by_q, by_k, by_v
