"""Causal attention of two regimes by torch's flash kernel, with near keys in sliding chunks.

With as many queries as keys and a window w, query i has the near keys i − w < j ≤ i and the far
keys j ≤ i − w. Three kinds of calls give outputs o and log-sum-exps ℓ:

    i < w     all keys are near: causal attention of the first w queries and keys
    near      c queries i = s … s + c − 1 over the keys s − w … s + c − 1, with one mask of the
              band |i − j| < w that all chunks share ("sliding chunks", Longformer)
    far       causal attention of far_q[w:], far_k[: S − w] and v[: S − w]

    o = o_near + (o_far − o_near) · λ,   λ = 1 / (1 + exp(ℓ_near − ℓ_far)),
    ℓ = log(exp ℓ_near + exp ℓ_far)

The backward is the flash backward of every part with the global o and ℓ (FlashAttention-2). It is
exact and needs no gradient through ℓ. Gradients of overlapping chunks add up in float32.

The flash kernel multiplies whole tiles of 512 keys, so a triangle costs as much as a square. Chunks
compute (w + c) / w times the pairs of the band; two triangles would compute twice as many. CPU
only.

Legend: B batch, H heads, G key heads, T queries, S keys, w window, c rows of a chunk, n chunks of
one call, D size. Log-sum-exps are natural logarithms.

Sources: Longformer, https://arxiv.org/abs/2004.05150 (3.1); FlashAttention-2,
https://arxiv.org/abs/2307.08691 (2.3.2); ReRoPE, https://kexue.fm/archives/9708.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from normattn.kernels.inputs import AttentionInputs
from normattn.kernels.numerics import at_least_float32, refuse_second_derivative
from normattn.kernels.reference import reference
from normattn.kernels.sdpa import dense, flash, flash_backward, is_slow_dtype

# The fewest rows at which torch's kernel multiplies 64 rows at a time. Measured in half precision,
# this halves the time per pair; more rows would compute more pairs outside the band.
ROWS = 192


def two_regime(inputs: AttentionInputs) -> Float[Tensor, "b h t d"]:
    """Causal attention of two regimes with as many queries as keys, by torch's flash kernel.

    Scores stay in float32, forward and backward. In half precision the kernel rounds weights and
    each part's output, as it does without regimes.
    """
    if not inputs.q.numel():
        return reference(inputs)  # torch's kernel does not support empty inputs
    inputs_f32 = inputs.upcast() if is_slow_dtype(inputs.q) else inputs
    out: Tensor = _TwoRegime.apply(inputs_f32.settings, *inputs_f32.tensors)  # type: ignore[no-untyped-call]
    return out.to(inputs.v.dtype)


@dataclass(frozen=True)
class _Chunks:
    """`count` chunks of `rows` queries each, from query `first` on, with the mask of their band."""

    first: int
    rows: int
    count: int
    window: int
    mask: Tensor

    @property
    def query_rows(self) -> slice:
        return slice(self.first, self.first + self.rows * self.count)

    def queries(self, x: Tensor) -> Tensor:
        """(B, H, T, …) as (n, B·H, c, …)."""
        rows = x[:, :, self.query_rows].flatten(0, 1)
        return torch.unflatten(rows, 1, (self.count, self.rows)).transpose(0, 1)

    def keys(self, x: Tensor) -> Tensor:
        """(B, G, S, D) as (n, B·G, w + c, D), a view in which chunks overlap."""
        keys = x[:, :, self.first - self.window : self.query_rows.stop].flatten(0, 1)
        return keys.unfold(1, self.window + self.rows, self.rows).permute(1, 0, 3, 2)

    def merge(self, x: Tensor, like: Tensor) -> Tensor:
        """(n, B·H, c, …) as (B, H, n·c, …)."""
        return torch.unflatten(x.transpose(0, 1).flatten(1, 2), 0, like.shape[:2])

    def add_to_keys(self, total: Tensor, x: Tensor) -> None:
        """Add (n, B·G, w + c, D) to the chunks' keys in `total` (B, G, S, D)."""
        for index, chunk in enumerate(torch.unflatten(x, 1, total.shape[:2]).unbind()):
            start = self.first - self.window + index * self.rows
            total[:, :, start : start + self.window + self.rows] += chunk


def _iter_chunks(q: Tensor, window: int) -> Iterator[_Chunks]:
    """All queries from position w on: whole chunks, several per call, and a shorter last one."""
    queries = q.shape[2]
    if queries <= window:
        return
    count, remainder = divmod(queries - window, ROWS)
    rows = min(ROWS, queries - window)
    # 0 for the near columns r < j ≤ r + w of row r of a chunk, −∞ elsewhere.
    hidden = q.new_full((rows, window + rows), -torch.inf, dtype=at_least_float32(q.dtype))
    mask = hidden.triu(window + 1).add_(hidden.tril_())
    # The overlapping keys of one call take no more memory than all keys.
    step = max(1, queries // (ROWS + window))
    for start in range(0, count, step):
        yield _Chunks(window + start * ROWS, ROWS, min(step, count - start), window, mask)
    if remainder:
        last_mask = mask[:remainder, : window + remainder]
        yield _Chunks(queries - remainder, remainder, 1, window, last_mask)


def _far_operands(inputs: AttentionInputs, window: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of the far part, of equal length."""
    assert inputs.far_q is not None
    assert inputs.far_k is not None
    v, count = inputs.v, inputs.v.shape[2] - window
    q, k = inputs.far_q[:, :, window:], inputs.far_k[:, :, :count]
    return q.to(v.dtype), k.to(v.dtype), v[:, :, :count]


class _TwoRegime(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, settings: Mapping[str, Any], *tensors: Tensor | None) -> Tensor:
        inputs = AttentionInputs.of(settings, tensors)
        q, k, v, window = inputs.q, dense(inputs.k), dense(inputs.v), inputs.far_from
        assert window is not None
        batch, heads, queries, size = q.shape
        # In the memory layout of torch's kernel.
        out = q.new_empty((batch, queries, heads, size)).transpose(1, 2)
        lse = q.new_empty((batch, heads, queries), dtype=at_least_float32(q.dtype))
        # The first queries have near keys only.
        head = slice(0, min(window, queries))
        out[:, :, head], lse[:, :, head] = flash(q[:, :, head], k[:, :, head], v[:, :, head], True)
        if window < queries:
            far_out, far_lse = flash(*_far_operands(inputs, window), True)
        for chunks in _iter_chunks(q, window):
            keys, values = chunks.keys(k), chunks.keys(v)
            near, near_lse = flash(chunks.queries(q), keys, values, False, chunks.mask)
            near, near_lse = chunks.merge(near, q), chunks.merge(near_lse, q)
            rows = slice(chunks.first - window, chunks.query_rows.stop - window)
            share = (far_lse[:, :, rows] - near_lse).sigmoid_()[..., None].to(q.dtype)
            torch.lerp(near, far_out[:, :, rows], share, out=out[:, :, chunks.query_rows])
            lse[:, :, chunks.query_rows] = torch.logaddexp(near_lse, far_lse[:, :, rows])
        ctx.save_for_backward(*tensors, out, lse)
        ctx.settings = settings
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("the two-regime kernel", "backend='reference'")
        *tensors, out, lse = ctx.saved_tensors
        inputs = AttentionInputs.of(ctx.settings, tensors)
        q, k, v, window = inputs.q, dense(inputs.k), dense(inputs.v), inputs.far_from
        assert window is not None
        grad_q = torch.empty_like(q)
        grad_k, grad_v = (torch.zeros_like(x, dtype=at_least_float32(x.dtype)) for x in (k, v))
        assert inputs.far_k is not None
        grad_far_q, grad_far_k = torch.zeros_like(q), torch.zeros_like(inputs.far_k)
        head = slice(0, min(window, q.shape[2]))
        near = q[:, :, head], k[:, :, head], v[:, :, head], out[:, :, head], lse[:, :, head]
        grad_q[:, :, head], grad_k[:, :, head], grad_v[:, :, head] = flash_backward(
            grad_out[:, :, head], *near, causal=True
        )
        if window < q.shape[2]:
            rows, keys = slice(window, None), slice(0, v.shape[2] - window)
            far = *_far_operands(inputs, window), out[:, :, rows], lse[:, :, rows]
            grad_far_q[:, :, rows], grad_far_k[:, :, keys], grad_far_v = flash_backward(
                grad_out[:, :, rows], *far, causal=True
            )
            grad_v[:, :, keys] += grad_far_v
            del grad_far_v
        for chunks in _iter_chunks(q, window):
            chunk = chunks.queries(q), chunks.keys(k), chunks.keys(v)
            results = chunks.queries(out), chunks.queries(lse)
            chunk_grad_q, chunk_grad_k, chunk_grad_v = flash_backward(
                chunks.queries(grad_out), *chunk, *results, causal=False, mask=chunks.mask
            )
            grad_q[:, :, chunks.query_rows] = chunks.merge(chunk_grad_q, q)
            chunks.add_to_keys(grad_k, chunk_grad_k)
            chunks.add_to_keys(grad_v, chunk_grad_v)
        grads = grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype), grad_far_q, grad_far_k
        return None, *grads, None, None
