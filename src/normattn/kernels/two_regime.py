"""Two regimes, causal: the far part is an ordinary causal call, the near part a band of tiles.

Queries at positions p ≥ w see the far keys j ≤ p − w: that is causal attention of (far_q[w:],
far_k[: S − w], v[: S − w]) and goes to the stock flash kernel, which returns its log-sum-exp too.
The band |p − j| < w goes by tiles that take this log-sum-exp as one more logit: its weight is what
the far output counts for. The backward is the flash backward of the far part with the *global*
output and log-sum-exp, which is exact and needs no gradient through the log-sum-exp.

Together they touch about the pairs of one causal attention. On a CPU only.

Legend: B batch, H heads, G key heads, r query heads per key head, T queries, S keys, w window,
X parts of the far keys, D size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from normattn.kernels.chunked import backward_tiles, forward_tiles
from normattn.kernels.derivatives import refuse_second_derivative
from normattn.kernels.flash import flash, flash_backward
from normattn.kernels.gradients import wide
from normattn.kernels.operands import grouped, ungrouped
from normattn.kernels.problem import Problem
from normattn.kernels.tiles import Plan


@dataclass(frozen=True)
class _Part:
    """Query rows from `first` on, some far keys that they see, and whether causally."""

    first: int
    keys: slice
    causal: bool


def _parts(problem: Problem) -> Iterator[_Part]:
    """The far keys in one causal call, after a dense one where fewer queries than keys are far.

    The stock causal mask aligns the first query with the first key, so it needs as many of both.
    """
    assert problem.window is not None
    queries, keys = problem.q.shape[2], problem.v.shape[2]
    far_keys = keys - problem.window
    first = max(0, problem.window - (keys - queries))
    dense = far_keys - (queries - first)
    if far_keys <= 0 or first >= queries:
        return
    if dense > 0:
        yield _Part(first, slice(0, dense), causal=False)
    yield _Part(first, slice(dense, far_keys), causal=True)


class _TwoRegime(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, settings: Mapping[str, Any], *tensors: Tensor | None) -> Tensor:
        problem = Problem.of(settings, tensors)
        plan = Plan.of(problem, near_only=True)
        q = grouped(problem.q, plan.repeat)
        parts = list(_parts(problem))
        outs, extra = [], _room(q, problem, len(parts), -torch.inf)
        for number, part in enumerate(parts):
            out, sums = _far(problem, part)
            outs.append(out)
            extra[:, :, part.first :, :, number] = grouped(sums, plan.repeat)
        share = _room(q, problem, len(parts), 0.0)
        near = forward_tiles(problem, plan, extra=extra, share=share)
        for number, (part, out) in enumerate(zip(parts, outs, strict=True)):
            weight = ungrouped(share[..., number : number + 1]).to(out.dtype)
            near[:, :, part.first :].addcmul_(weight[:, :, part.first :], out)
        # Where the far keys weigh nothing this is +∞, and their weights 0 in the backward.
        whole = extra.logsumexp(-1) - share.sum(-1).log() if parts else extra
        ctx.save_for_backward(*tensors, near, extra, whole)
        ctx.settings = settings
        return near

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("the two-regime kernel", "backend='reference'")
        *tensors, out, extra, whole = ctx.saved_tensors
        problem = Problem.of(ctx.settings, tensors)
        plan = Plan.of(problem, near_only=True)
        delta = (grads[0] * out).sum(-1, keepdim=True, dtype=extra.dtype)
        sums = backward_tiles(
            problem, plan, grads[0], extra=extra, delta=grouped(delta, plan.repeat)
        )
        assert problem.far_q is not None
        assert problem.far_k is not None
        by_far_q = problem.far_q.new_empty(problem.far_q.shape)
        by_far_k = problem.far_k.new_empty(problem.far_k.shape)
        first, end = by_far_q.shape[2], 0
        for number, part in enumerate(_parts(problem)):
            first, end = part.first, part.keys.stop
            rows = slice(first, None)
            q, k, v = _far_side(problem, part, out.dtype)
            above, sums_here = grads[0][:, :, rows], ungrouped(whole)[:, :, rows]
            by_q, by_k, by_v = flash_backward(
                above, q, k, v, out[:, :, rows], sums_here, part.causal
            )
            if number:
                by_far_q[:, :, rows] += by_q
            else:
                by_far_q[:, :, rows] = by_q
            by_far_k[:, :, part.keys] = by_k
            sums.v[:, :, part.keys] += by_v
        by_far_q[:, :, :first] = 0
        by_far_k[:, :, end:] = 0
        gradients = sums.all(problem)
        return (None, *gradients[:3], by_far_q, by_far_k, *gradients[5:])


def _room(q: Tensor, problem: Problem, parts: int, value: float) -> Tensor:
    """(B, G, T, r, X) in wide type: what the flash operator gives and takes."""
    return q.new_full((*q.shape[:-1], parts), value, dtype=wide(q.dtype))


def _far_side(problem: Problem, part: _Part, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    assert problem.far_q is not None
    assert problem.far_k is not None
    q = problem.far_q[:, :, part.first :]
    k, v = problem.far_k[:, :, part.keys], problem.v[:, :, part.keys]
    return q.to(dtype), k.to(dtype), v.to(dtype)


def _far(problem: Problem, part: _Part) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of a part, read in the type of the far keys."""
    assert problem.far_k is not None
    out, sums = flash(*_far_side(problem, part, problem.far_k.dtype), part.causal)
    return out.to(problem.v.dtype), sums


def two_regime(problem: Problem) -> Float[Tensor, "b h t e"]:
    """Causal attention of two regimes by the stock flash kernel and a band of tiles.

    In half precision no score is rounded: the stock kernel keeps its own in float32, and tiles are
    given the near side widened. The backward is computed in float32.
    """
    given = problem.q.dtype
    if problem.q.element_size() == 2:
        q, k, v = problem.q.float(), problem.k.float(), problem.v.float()
        problem = replace(problem, q=q, k=k, v=v)
    out: Tensor = _TwoRegime.apply(problem.settings, *problem.tensors)  # type: ignore[no-untyped-call]
    return out.to(given)
