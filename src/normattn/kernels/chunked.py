"""Attention by chunks of query rows: no T × S matrix, any mask, any value size, two regimes.

The forward keeps the output and the log-sum-exp of each row; the backward computes each chunk's
weights once more. In two regimes a chunk multiplies only the keys that it needs of each: the
near columns start at the window, the far ones end before it, so together they are about the
pairs of one causal attention.

Legend: B batch, H heads, T queries, S keys, D score size, E value size, c rows of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from normattn.kernels.derivatives import refuse_second_derivative
from normattn.kernels.problem import Problem, Visibility

CHUNK = 256


@dataclass(frozen=True)
class _Block:
    """Rows of a chunk, the columns they can see, and where the far columns end, the near begin."""

    rows: slice
    end: int
    far_end: int
    near_start: int


def _blocks(
    visibility: Visibility, queries: int, keys: int, window: int | None
) -> Iterator[_Block]:
    shift = keys - queries
    for start in range(0, queries, CHUNK):
        stop = min(start + CHUNK, queries)
        if not (visibility.aligned and visibility.causal):
            far = 0 if window is None else keys
            yield _Block(slice(start, stop), keys, far, 0)
            continue
        end = stop + shift
        if window is None:
            yield _Block(slice(start, stop), end, 0, 0)
        else:
            first = start + shift
            yield _Block(slice(start, stop), end, max(0, end - window), max(0, first - window + 1))


def _scores(
    q: Tensor, k: Tensor, far: tuple[Tensor, Tensor, int] | None, vis: Visibility, block: _Block
) -> Tensor:
    """The scores of a chunk, (B, H, c, end), hidden keys at −∞."""
    rows, seen = block.rows, slice(0, block.end)
    if far is None:
        score = q[:, :, rows] @ k[:, :, seen].transpose(-1, -2)
    else:
        far_q, far_k, window = far
        score = q.new_empty(*q.shape[:2], rows.stop - rows.start, block.end)
        score[..., : block.far_end] = far_q[:, :, rows] @ far_k[:, :, : block.far_end].transpose(
            -1, -2
        )
        near = q[:, :, rows] @ k[:, :, block.near_start : block.end].transpose(-1, -2)
        both = slice(block.near_start, block.far_end)
        if block.far_end > block.near_start:
            overlap = near[..., : block.far_end - block.near_start]
            is_far = vis.distance(rows, both) >= window
            near[..., : block.far_end - block.near_start] = torch.where(
                is_far, score[..., both], overlap
            )
        score[..., block.near_start :] = near
    added = vis.added(rows, seen)
    if added is not None:
        score = score + added
    hidden = vis.hidden(rows, seen)
    return score if hidden is None else score.masked_fill_(hidden, -torch.inf)


def _keep(shape: torch.Size, rate: float, seed: int, start: int, like: Tensor) -> Tensor:
    """The dropout mask of a chunk, over 1 − rate; the same in forward and backward."""
    generator = torch.Generator(device=like.device)
    generator.manual_seed(seed + start)
    keep = torch.rand(shape, generator=generator, device=like.device) >= rate
    return keep.to(like.dtype) / (1 - rate)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        far_q: Tensor | None,
        far_k: Tensor | None,
        window: int | None,
        visibility: Visibility,
        dropout: float,
        seed: int,
    ) -> Tensor:
        out = q.new_empty(*q.shape[:3], v.shape[-1])
        lse = q.new_empty(q.shape[:3], dtype=_wide(q.dtype))
        far = _far(far_q, far_k, window)
        for block in _blocks(visibility, q.shape[2], k.shape[2], window):
            score = _scores(q, k, far, visibility, block).to(lse.dtype)
            top = score.amax(-1, keepdim=True).clamp_(min=torch.finfo(score.dtype).min)
            weight = score.sub_(top).exp_()
            total = weight.sum(-1, keepdim=True)
            lse[:, :, block.rows] = (total.log() + top).squeeze(-1)
            weight = weight.div_(total.clamp(min=torch.finfo(score.dtype).tiny)).to(q.dtype)
            if dropout:
                weight = weight * _keep(weight.shape, dropout, seed, block.rows.start, weight)
            out[:, :, block.rows] = weight @ v[:, :, : block.end]
        ctx.save_for_backward(q, k, v, far_q, far_k, out, lse)
        ctx.settings = window, visibility, dropout, seed
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("the chunked kernel", "backend='reference'")
        q, k, v, far_q, far_k, out, lse = ctx.saved_tensors
        window, visibility, dropout, seed = ctx.settings
        far = _far(far_q, far_k, window)
        grad = grads[0]
        sums = _Gradients.like(q, k, v, far)
        delta = (grad * out).sum(-1, keepdim=True, dtype=lse.dtype)
        for block in _blocks(visibility, q.shape[2], k.shape[2], window):
            rows, seen = block.rows, slice(0, block.end)
            score = _scores(q, k, far, visibility, block).to(lse.dtype)
            # A row without a visible key has lse = −∞; its weights are 0.
            floor = lse[:, :, rows, None].clamp(min=torch.finfo(lse.dtype).min)
            weight = score.sub_(floor).exp_()
            by_value = (grad[:, :, rows] @ v[:, :, seen].transpose(-1, -2)).to(lse.dtype)
            used = weight
            if dropout:
                keep = _keep(weight.shape, dropout, seed, rows.start, weight)
                used, by_value = weight * keep, by_value.mul_(keep)
            sums.v[:, :, seen] += used.to(q.dtype).transpose(-1, -2) @ grad[:, :, rows]
            by_score = by_value.sub_(delta[:, :, rows]).mul_(weight).to(q.dtype)
            sums.add(by_score, q, k, far, visibility, block)
        return (*sums.all(), None, None, None, None)


@dataclass
class _Gradients:
    """Gradients under construction; those of keys and values gather over chunks in wide type."""

    q: Tensor
    k: Tensor
    v: Tensor
    far_q: Tensor | None
    far_k: Tensor | None
    dtype: torch.dtype

    @staticmethod
    def like(q: Tensor, k: Tensor, v: Tensor, far: tuple[Tensor, Tensor, int] | None) -> _Gradients:
        wide = _wide(q.dtype)
        return _Gradients(
            torch.empty_like(q),
            torch.zeros_like(k, dtype=wide),
            torch.zeros_like(v, dtype=wide),
            None if far is None else torch.empty_like(q),
            None if far is None else torch.zeros_like(k, dtype=wide),
            q.dtype,
        )

    def add(
        self,
        by_score: Tensor,
        q: Tensor,
        k: Tensor,
        far: tuple[Tensor, Tensor, int] | None,
        visibility: Visibility,
        block: _Block,
    ) -> None:
        """Send a chunk's gradient of the scores to queries and keys of both regimes."""
        rows, near = block.rows, slice(block.near_start, block.end)
        if far is not None and self.far_q is not None and self.far_k is not None:
            far_q, far_k, window = far
            cut = slice(0, block.far_end)
            is_far = visibility.distance(rows, cut) >= window
            distant = by_score[..., cut] * is_far
            by_score = by_score.clone()
            by_score[..., cut] *= ~is_far
            self.far_q[:, :, rows] = distant @ far_k[:, :, cut]
            self.far_k[:, :, cut] += distant.transpose(-1, -2) @ far_q[:, :, rows]
        close = by_score[..., near]
        self.q[:, :, rows] = close @ k[:, :, near]
        self.k[:, :, near] += close.transpose(-1, -2) @ q[:, :, rows]

    def all(self) -> tuple[Tensor | None, ...]:
        """The gradients of q, k, v, far q, far k and of the window (none)."""
        far_k = None if self.far_k is None else self.far_k.to(self.dtype)
        return (self.q, self.k.to(self.dtype), self.v.to(self.dtype), self.far_q, far_k, None)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _far(
    q: Tensor | None, k: Tensor | None, window: int | None
) -> tuple[Tensor, Tensor, int] | None:
    return None if q is None or k is None or window is None else (q, k, window)


def chunked(problem: Problem) -> Float[Tensor, "b h t e"]:
    """Attention by chunks of 256 query rows; memory O((T + S)·D + 256·S) per head.

    A floating mask gets no gradient here: `why_not_chunked` refuses one that wants it.
    """
    p = problem.expanded()
    seed = int(torch.randint(2**62, ()).item()) if p.dropout else 0
    out: Tensor = _Chunked.apply(  # type: ignore[no-untyped-call]
        p.q, p.k, p.v, p.far_q, p.far_k, p.window, p.visibility, p.dropout, seed
    )
    return out


def why_not_chunked(problem: Problem) -> str | None:
    """The reason why this kernel cannot serve the problem, or None."""
    mask = problem.visibility.mask
    if mask is not None and mask.requires_grad:
        return "it gives no gradient to a mask"
    return None
