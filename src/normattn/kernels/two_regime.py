"""Near and far attention, causal, with the stock flash kernel: near keys in sliding chunks.

With as many queries as keys and a window w, query i has the near keys i − w < j ≤ i and the far
keys j ≤ i − w, and three kinds of calls give the outputs o and log-sum-exps ℓ of its parts:

    i < w     all keys are near: causal attention of the first w queries and keys
    near      c queries i = s … s + c − 1 at once over the keys s − w … s + c − 1, with the band
              |i − j| < w cut out by one mask that all chunks share ("sliding chunks", Longformer)
    far       causal attention of far_q[w:], far_k[: S − w] and v[: S − w]

    o = o_near + (o_far − o_near) · λ,   λ = 1 / (1 + exp(ℓ_near − ℓ_far)),
    ℓ = log(exp ℓ_near + exp ℓ_far)

The backward is the flash backward of every part with the global o and ℓ (FlashAttention-2), which
is exact and needs no gradient through ℓ; what chunks give to the same keys adds up in wide type.

The stock kernel multiplies whole tiles of 512 keys, so triangles without a mask cost as much as
squares: chunks touch (w + c) / w of the band's pairs, a diagonal and a reversed triangle twice as
many. On a CPU only.

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
from normattn.kernels.sdpa import dense, flash, flash_backward, slow_type

# The fewest rows of which torch's kernel multiplies 64 at a time (measured: half of the time per
# pair of the next fewer in half precision; more rows touch more pairs beside the band).
ROWS = 192


def two_regime(inputs: AttentionInputs) -> Float[Tensor, "b h t d"]:
    """Causal attention of two regimes, of as many queries as keys, by the stock kernel alone.

    In half precision no score is rounded, forward or backward: the stock kernel keeps its own in
    float32, and rounds weights and each part's output, as it does without regimes.
    """
    if not inputs.q.numel():
        return reference(inputs)  # torch's kernel has no answer for an empty batch
    wide = inputs.widened() if slow_type(inputs.q) else inputs
    out: Tensor = _TwoRegime.apply(wide.settings, *wide.tensors)  # type: ignore[no-untyped-call]
    return out.to(inputs.v.dtype)


class _TwoRegime(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, settings: Mapping[str, Any], *tensors: Tensor | None) -> Tensor:
        out, sums = _forward(AttentionInputs.of(settings, tensors))
        ctx.save_for_backward(*tensors, out, sums)
        ctx.settings = settings
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("the two-regime kernel", "backend='reference'")
        *tensors, out, sums = ctx.saved_tensors
        inputs = AttentionInputs.of(ctx.settings, tensors)
        return None, *_backward(inputs, grads[0], out, sums), None, None


@dataclass(frozen=True)
class _Chunks:
    """`count` chunks of `rows` queries each from query `first` on, and the band of each."""

    first: int
    rows: int
    count: int
    window: int
    mask: Tensor

    @property
    def span(self) -> slice:
        """All its queries."""
        return slice(self.first, self.first + self.rows * self.count)

    def queries(self, x: Tensor) -> Tensor:
        """(B, H, T, …) as (n, B·H, c, …)."""
        own = x[:, :, self.span].flatten(0, 1)
        return torch.unflatten(own, 1, (self.count, self.rows)).transpose(0, 1)

    def keys(self, x: Tensor) -> Tensor:
        """(B, G, S, D) as (n, B·G, w + c, D), a view: a key is in several chunks."""
        own = x[:, :, self.first - self.window : self.span.stop].flatten(0, 1)
        return own.unfold(1, self.window + self.rows, self.rows).permute(1, 0, 3, 2)

    def joined(self, x: Tensor, like: Tensor) -> Tensor:
        """(n, B·H, c, …) as (B, H, n·c, …)."""
        return torch.unflatten(x.transpose(0, 1).flatten(1, 2), 0, like.shape[:2])

    def add(self, into: Tensor, x: Tensor) -> None:
        """Add (n, B·G, w + c, D) to the keys (B, G, S, D) that the chunks read."""
        for number, part in enumerate(torch.unflatten(x, 1, into.shape[:2]).unbind()):
            start = self.first - self.window + number * self.rows
            into[:, :, start : start + self.window + self.rows] += part


def _chunks(q: Tensor, window: int) -> Iterator[_Chunks]:
    """All queries from position w on: whole chunks, some at once, and a shorter last one.

    Their keys overlap: those of one call, and so their gradients, are no more than all keys.
    """
    queries = q.shape[2]
    if queries <= window:
        return
    count, rest = divmod(queries - window, ROWS)
    rows = min(ROWS, queries - window)
    # 0 where row r of a chunk has column r < j ≤ r + w near, −∞ elsewhere.
    hidden = q.new_full((rows, window + rows), -torch.inf, dtype=at_least_float32(q.dtype))
    mask = hidden.triu(window + 1).add_(hidden.tril_())
    step = max(1, queries // (ROWS + window))
    for start in range(0, count, step):
        yield _Chunks(window + start * ROWS, ROWS, min(step, count - start), window, mask)
    if rest:
        yield _Chunks(queries - rest, rest, 1, window, mask[:rest, : window + rest])


def _far(inputs: AttentionInputs, window: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of the far part, which has as many of each."""
    assert inputs.far_q is not None
    assert inputs.far_k is not None
    v, count = inputs.v, inputs.v.shape[2] - window
    q, k = inputs.far_q[:, :, window:], inputs.far_k[:, :, :count]
    return q.to(v.dtype), k.to(v.dtype), v[:, :, :count]


def _forward(inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    """The output, laid out as the stock kernel's, and the log-sum-exp of each row."""
    q, k, v, window = inputs.q, dense(inputs.k), dense(inputs.v), inputs.window
    assert window is not None
    batch, heads, queries, size = q.shape
    out = q.new_empty((batch, queries, heads, size)).transpose(1, 2)
    sums = q.new_empty((batch, heads, queries), dtype=at_least_float32(q.dtype))
    # The first queries have near keys only.
    head = slice(0, min(window, queries))
    out[:, :, head], sums[:, :, head] = flash(q[:, :, head], k[:, :, head], v[:, :, head], True)
    if window >= queries:
        return out, sums
    far_out, far_sums = flash(*_far(inputs, window), True)
    for chunks in _chunks(q, window):
        keys, values = chunks.keys(k), chunks.keys(v)
        near, near_sums = flash(chunks.queries(q), keys, values, False, chunks.mask)
        near, near_sums = chunks.joined(near, q), chunks.joined(near_sums, q)
        rows = slice(chunks.first - window, chunks.span.stop - window)
        share = (far_sums[:, :, rows] - near_sums).sigmoid_()[..., None].to(q.dtype)
        torch.lerp(near, far_out[:, :, rows], share, out=out[:, :, chunks.span])
        sums[:, :, chunks.span] = torch.logaddexp(near_sums, far_sums[:, :, rows])
    return out, sums


def _backward(
    inputs: AttentionInputs, by_out: Tensor, out: Tensor, sums: Tensor
) -> tuple[Tensor, ...]:
    """The gradients of q, k, v, far_q and far_k."""
    q, k, v, window = inputs.q, dense(inputs.k), dense(inputs.v), inputs.window
    assert inputs.far_q is not None
    assert inputs.far_k is not None
    assert window is not None
    by_q = torch.empty_like(q)
    by_k, by_v = (torch.zeros_like(x, dtype=at_least_float32(x.dtype)) for x in (k, v))
    by_far_q, by_far_k = torch.zeros_like(inputs.far_q), torch.zeros_like(inputs.far_k)
    head = slice(0, min(window, q.shape[2]))
    near = q[:, :, head], k[:, :, head], v[:, :, head], out[:, :, head], sums[:, :, head]
    by_q[:, :, head], by_k[:, :, head], by_v[:, :, head] = flash_backward(
        by_out[:, :, head], *near, causal=True
    )
    if window < q.shape[2]:
        rows, keys, far = slice(window, None), slice(0, v.shape[2] - window), _far(inputs, window)
        by_far_q[:, :, rows], by_far_k[:, :, keys], by_far_v = flash_backward(
            by_out[:, :, rows], *far, out[:, :, rows], sums[:, :, rows], True
        )
        by_v[:, :, keys] += by_far_v
        del by_far_v
    for chunks in _chunks(q, window):
        of_q, of_k, of_v = flash_backward(
            chunks.queries(by_out),
            *(chunks.queries(q), chunks.keys(k), chunks.keys(v)),
            *(chunks.queries(out), chunks.queries(sums)),
            causal=False,
            mask=chunks.mask,
        )
        by_q[:, :, chunks.span] = chunks.joined(of_q, q)
        chunks.add(by_k, of_k)
        chunks.add(by_v, of_v)
    return by_q, by_k.to(k.dtype), by_v.to(v.dtype), by_far_q, by_far_k
