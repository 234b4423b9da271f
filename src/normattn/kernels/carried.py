"""Residual scores by a reversible carry: one buffer of scores for a whole stack of layers.

Going up, layer n adds its products to the buffer in place, tile by tile, and attends with softmax
of the sums; coming down, its backward finds s_n in the buffer, adds its gradient to a second
buffer (that of s_m is the sum of those of all layers from m on), and takes its products away again.
So a stack of any depth holds one or two numbers per pair, where a stored sum holds several for each
layer, and computes no more products than attention without a carry does. What undoing rounds off is
about the last digit of a score.

Layers are chained by an empty tensor, so that backward meets them from the top down. A layer above
that a backward leaves out (a loss at an early exit) is undone with its remembered queries and keys.
Undoing happens once: a second backward, and a second derivative, are refused.

Without gradients the same buffer is carried upwards only: a chunk of rows and all their keys when a
prompt is read, one row in a decode step.

Legend: B batch, H heads, T queries, S keys, E value size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from normattn.errors import InputError
from normattn.kernels.carry import CarriedScores
from normattn.kernels.chunked import backward_tiles, draw_seed, forward_tiles
from normattn.kernels.derivatives import refuse_second_derivative
from normattn.kernels.infinities import certainly_finite
from normattn.kernels.observe import Eye
from normattn.kernels.operands import Operands
from normattn.kernels.problem import Problem
from normattn.kernels.products import Products
from normattn.kernels.score_buffer import Ledger
from normattn.kernels.tiles import Plan


class Position(NamedTuple):
    """Of a layer in its stack: number, from 1, what multiplies the sum, whether gradients come."""

    number: int
    share: float
    learning: bool


class _Carried(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        ledger: Ledger,
        position: Position,
        settings: Mapping[str, Any],
        seed: int,
        eye: Eye | None,
        token: Tensor,
        *tensors: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        problem = Problem.of(settings, tensors)
        plan = Plan.of(problem)
        layer = ledger.up(problem.q, plan, position.number, position.share)
        layer = replace(layer, finite=certainly_finite(problem.q, problem.k))
        if position.learning:
            ledger.remembered[position.number] = problem.q.detach(), problem.k.detach()
        ctx.save_for_backward(*tensors)
        ctx.rest = ledger, position, settings, seed
        out = forward_tiles(problem, plan, seed, carried=layer, eye=eye)
        return out, token.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("the carried kernel", "backend='reference'")
        ledger, position, settings, seed = ctx.rest
        number = position.number
        if ledger.at < number:
            raise InputError(
                "carried scores are undone in a backward and serve one only: add the losses and "
                "call backward once, or use backend='reference' or 'concatenated'"
            )
        problem = Problem.of(settings, ctx.saved_tensors)
        plan = Plan.of(problem)
        _undo_above(ledger, problem, plan, number)
        layer = ledger.down(problem.q, plan, number, position.share)
        sums = backward_tiles(problem, plan, grads[0], seed, carried=layer)
        ledger.undone(number)
        return (None, None, None, None, None, grads[1], *sums.all(problem))


def _undo_above(ledger: Ledger, problem: Problem, plan: Plan, number: int) -> None:
    """Take away what layers that this backward has not met added."""
    while ledger.at > number:
        layer = ledger.sums
        assert layer is not None
        q, k = ledger.remembered[ledger.at]
        above = Problem(q, k, problem.v, problem.visibility)
        for group in plan.groups(q):
            products = Products(Operands.of(above, plan, group), 0)
            for tile in plan.tiles:
                products.accumulate(layer.tile(group, tile), tile, sign=-1)
        ledger.undone(ledger.at)


def carried(problem: Problem, eye: Eye | None = None) -> Float[Tensor, "b h t e"]:
    """softmax(Σ_m q_m k_mᵀ) · v, the products of this layer joining those of the layers below.

    `eye` looks on, and changes nothing. Raises `InputError` where the layers below have another
    shape or see other pairs, in a recomputation by activation checkpointing, and in a second
    backward.
    """
    # `disable` loads the compiler, which takes longer than torch itself: only where one runs.
    if torch.compiler.is_compiling():
        out: Tensor = torch.compiler.disable(_carried)(problem, eye)  # type: ignore[no-untyped-call]
        return out
    return _carried(problem, eye)


def _carried(problem: Problem, eye: Eye | None) -> Tensor:
    state = problem.carry
    assert isinstance(state, CarriedScores)
    state.enter("carried", problem.stack)
    if state.ledger is None:
        state.ledger = Ledger(Plan.of(problem))
    token = problem.q.new_empty(0) if state.token is None else state.token
    tensors = problem.tensors
    wanted = any(x is not None and x.requires_grad for x in (token, *tensors))
    position = Position(state.count, state.share, wanted and torch.is_grad_enabled())
    out, state.token = _Carried.apply(  # type: ignore[no-untyped-call]
        *(state.ledger, position, problem.settings, draw_seed(problem), eye, token, *tensors)
    )
    attended: Tensor = out
    return attended
