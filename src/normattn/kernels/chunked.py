"""Attention tile by tile: no T × S matrix, any mask, any value size, two regimes, bias, cap, sink.

A tile's weights fit into the cache, so softmax costs little beside the products; the backward
computes them once more instead of keeping them. In half precision the scores are rounded to it
before softmax, which runs in float32; `backend="fused"` keeps them in float32 throughout.

Legend: B batch, H heads, G key heads, T queries, S keys, D score size, E value size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from normattn.kernels.derivatives import refuse_second_derivative
from normattn.kernels.gradients import Gradients, GroupGradients
from normattn.kernels.observe import Eye
from normattn.kernels.observe_tiles import show_tile
from normattn.kernels.operands import grouped, ungrouped
from normattn.kernels.problem import Problem
from normattn.kernels.score_buffer import LayerScores
from normattn.kernels.scores import Scores
from normattn.kernels.subnormals import flushing
from normattn.kernels.summed import SummedScores
from normattn.kernels.tiles import Group, Plan


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, settings: Mapping[str, Any], seed: int, eye: Eye | None, *tensors: Tensor | None
    ) -> Tensor:
        problem = Problem.of(settings, tensors)
        ctx.save_for_backward(*tensors)
        ctx.settings = settings, seed
        return forward_tiles(problem, Plan.of(problem), seed, eye=eye)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("the chunked kernel", "backend='reference'")
        settings, seed = ctx.settings
        problem = Problem.of(settings, ctx.saved_tensors)
        sums = backward_tiles(problem, Plan.of(problem), grads[0], seed)
        return (None, None, None, *sums.all(problem))


@flushing
def forward_tiles(
    problem: Problem,
    plan: Plan,
    seed: int = 0,
    extra: Tensor | None = None,
    share: Tensor | None = None,
    carried: LayerScores | None = None,
    eye: Eye | None = None,
) -> Float[Tensor, "b h t e"]:
    """softmax(score) · v.

    `extra` (B, G, T, r, X) are further logits of each row, whose values another kernel adds: their
    weights are written to `share`. With `carried` the products join the sums that stand there, and
    those are the scores. `eye` looks at every tile.
    """
    q, v = problem.q, problem.v
    out = v.new_empty(*grouped(q, plan.repeat).shape[:-1], v.shape[-1])
    number = 0
    for group in plan.groups(q):
        scores = _scores(problem, plan, group, extra, carried)
        operands = scores.operands
        target = out[group.batch, group.heads].flatten(0, 1).flatten(1, 2)
        for tile in plan.tiles:
            scores.enter(tile)
            weight = scores.weights(tile, kept=eye is not None)
            if eye is not None:
                show_tile(eye, scores, tile)
            if share is not None:
                operands.at(share, tile).copy_(operands.apart(weight)[..., tile.width :])
            if problem.dropout:
                keep = keep_mask(weight, tile.width, problem.dropout, seed + number)
                weight[..., : tile.width] *= keep
            scores.products.values(weight, tile, target[:, operands.lines(tile)])
            number += 1
    return ungrouped(out)


@flushing
def backward_tiles(
    problem: Problem,
    plan: Plan,
    by_out: Float[Tensor, "b h t e"],
    seed: int = 0,
    extra: Tensor | None = None,
    delta: Tensor | None = None,
    carried: LayerScores | None = None,
) -> Gradients:
    """The gradients, the weights computed once more.

    `delta` (B, G, T, r, 1) is Σ_e out·by_out of each row where `extra` holds logits whose values
    are elsewhere. With `carried` the sums there lose this layer's products again.
    """
    sums = Gradients.like(problem, plan)
    by_out = grouped(by_out, plan.repeat)
    number = 0
    for group in plan.groups(problem.q):
        scores = _scores(problem, plan, group, extra, carried)
        operands = scores.operands
        part = GroupGradients(sums, scores)
        grad = by_out[group.batch, group.heads].flatten(0, 1).flatten(1, 2)
        for tile in plan.tiles:
            weight = scores.weights(tile, capped=True)
            here = grad[:, operands.lines(tile)]
            by_weight = scores.products.by_weight(here, tile)
            used = weight
            if problem.dropout:
                keep = keep_mask(weight, tile.width, problem.dropout, seed + number)
                used = weight[..., : tile.width] * keep
                by_weight[..., : tile.width] *= keep
            part.add_values(here, used, tile)
            if delta is None:
                torch._softmax_backward_data(
                    by_weight, weight, -1, weight.dtype, grad_input=by_weight
                )
            else:
                operands.apart(by_weight).sub_(operands.at(delta, tile))
                by_weight.mul_(weight)
            part.add_scores(by_weight, tile)
            scores.leave(tile)
            number += 1
        part.close()
    return sums


def _scores(
    problem: Problem,
    plan: Plan,
    group: Group,
    extra: Tensor | None,
    carried: LayerScores | None,
) -> Scores:
    if carried is None:
        return Scores(problem, plan, group, extra)
    return SummedScores(problem, plan, group, carried)


def keep_mask(weight: Tensor, columns: int, rate: float, seed: int) -> Tensor:
    """The dropout mask of a tile, over 1 − rate; the same in forward and backward."""
    generator = torch.Generator(device=weight.device)
    generator.manual_seed(seed)
    shape = (*weight.shape[:-1], columns)
    keep = torch.rand(shape, generator=generator, device=weight.device) >= rate
    return keep.to(weight.dtype) / (1 - rate)


def chunked(problem: Problem, eye: Eye | None = None) -> Float[Tensor, "b h t e"]:
    """Attention by tiles of about 1 MiB of scores; memory O((T + S)·(D + E)) per head beside them.

    A floating mask gets no gradient here: `capabilities` refuses one that wants it. `eye` looks
    on, and changes nothing.
    """
    seed = draw_seed(problem)
    out: Tensor = _Chunked.apply(problem.settings, seed, eye, *problem.tensors)  # type: ignore[no-untyped-call]
    return out


def draw_seed(problem: Problem) -> int:
    """The seed of the problem's dropout."""
    return int(torch.randint(2**62, ()).item()) if problem.dropout else 0
