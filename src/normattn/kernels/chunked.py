"""Attention tile by tile: no T × S matrix, any mask, any value size, two regimes.

A tile's weights fit into the cache, so softmax costs little beside the products; the backward
computes them once more instead of keeping them. In half precision the scores are rounded to it
before softmax, which runs in float32; `backend="fused"` keeps them in float32 throughout.

Legend: B batch, H heads, T queries, S keys, D score size, E value size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from normattn.kernels.derivatives import refuse_second_derivative
from normattn.kernels.problem import Problem, Visibility
from normattn.kernels.tiles import Regimes, Tile, distant, tiles, weights


def _keep(weight: Tensor, rate: float, seed: int, number: int) -> Tensor:
    """The dropout mask of a tile, over 1 − rate; the same in forward and backward."""
    generator = torch.Generator(device=weight.device)
    generator.manual_seed(seed + number)
    keep = torch.rand(weight.shape, generator=generator, device=weight.device) >= rate
    return keep.to(weight.dtype) / (1 - rate)


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
        v = v.contiguous()
        out = q.new_empty(*q.shape[:3], v.shape[-1])
        regimes = Regimes(q, k, far_q, far_k, window)
        for number, tile in enumerate(tiles(q, k.shape[2], window, visibility)):
            weight = weights(regimes, tile)
            if dropout:
                weight *= _keep(weight, dropout, seed, number)
            out[tile.queries] = weight @ v[tile.keys(0, tile.end)]
        ctx.save_for_backward(q, k, v, far_q, far_k)
        ctx.settings = window, visibility, dropout, seed
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("the chunked kernel", "backend='reference'")
        q, k, v, far_q, far_k = ctx.saved_tensors
        window, visibility, dropout, seed = ctx.settings
        regimes = Regimes(q, k, far_q, far_k, window)
        grad = grads[0].contiguous()
        sums = _Gradients.like(regimes, v)
        for number, tile in enumerate(tiles(q, k.shape[2], window, visibility)):
            weight = weights(regimes, tile)
            values = tile.keys(0, tile.end)
            by_out = grad[tile.queries]
            by_weight = by_out @ v[values].transpose(-1, -2)
            used = weight
            if dropout:
                keep = _keep(weight, dropout, seed, number)
                used, by_weight = weight * keep, by_weight.mul_(keep)
            sums.v[values] += used.transpose(-1, -2) @ by_out
            by_score = torch._softmax_backward_data(by_weight, weight, -1, weight.dtype)
            sums.add(by_score, regimes, tile)
        return (*sums.all(), None, None, None, None)


@dataclass
class _Gradients:
    """Gradients under construction; those of keys and values gather over tiles in wide type."""

    q: Tensor
    k: Tensor
    v: Tensor
    far_q: Tensor | None
    far_k: Tensor | None
    dtype: torch.dtype

    @staticmethod
    def like(regimes: Regimes, v: Tensor) -> _Gradients:
        """Zeros of the right shapes."""
        dtype = v.dtype
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        far = regimes.far_q is not None and regimes.far_k is not None
        return _Gradients(
            torch.empty_like(regimes.q),
            torch.zeros_like(regimes.k, dtype=wide),
            torch.zeros_like(v, dtype=wide),
            torch.zeros_like(regimes.q) if far else None,
            torch.zeros_like(regimes.k, dtype=wide) if far else None,
            dtype,
        )

    def add(self, by_score: Tensor, regimes: Regimes, tile: Tile) -> None:
        """Send a tile's gradient of the scores to queries and keys of both regimes."""
        rows, near = tile.queries, tile.keys(tile.near_start, tile.end)
        if self.far_q is not None and self.far_k is not None and tile.far_end:
            assert regimes.far_q is not None
            assert regimes.far_k is not None
            cut = tile.keys(0, tile.far_end)
            is_far = distant(regimes, tile, slice(0, tile.far_end))
            beyond = by_score[..., : tile.far_end] * is_far
            by_score[..., : tile.far_end].masked_fill_(is_far, 0.0)
            self.far_q[rows] = beyond @ regimes.far_k[cut]
            self.far_k[cut] += beyond.transpose(-1, -2) @ regimes.far_q[rows]
        close = by_score[..., tile.near_start :]
        self.q[rows] = close @ regimes.k[near]
        self.k[near] += close.transpose(-1, -2) @ regimes.q[rows]

    def all(self) -> tuple[Tensor | None, ...]:
        """The gradients of q, k, v, far q, far k and of the window (none)."""
        far_k = None if self.far_k is None else self.far_k.to(self.dtype)
        return (self.q, self.k.to(self.dtype), self.v.to(self.dtype), self.far_q, far_k, None)


def chunked(problem: Problem) -> Float[Tensor, "b h t e"]:
    """Attention by tiles of about 1 MiB of scores; memory O((T + S)·(D + E)) per head beside them.

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
    if problem.bias is not None or problem.sink is not None or problem.cap is not None:
        return "it adds no bias, no sink and no cap to the score"
    mask = problem.visibility.mask
    if mask is not None and mask.requires_grad:
        return "it gives no gradient to a mask"
    return None
