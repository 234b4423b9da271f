"""The chunked kernel as one node of a compiled graph: a compiler need not unroll its tiles.

Each operation takes a problem field by field, as an operator's schema wants it.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from normattn.kernels.chunked import backward_tiles, draw_seed, forward_tiles
from normattn.kernels.problem import Problem, Settings, Visibility
from normattn.kernels.tiles import Plan

# Among an operation's arguments: where the tensors that a gradient may reach end.
_LEARNING = 7


def _problem(*fields: Any) -> Problem:
    tensors, seen, rest = fields[:_LEARNING], fields[_LEARNING:-4], fields[-4:]
    query, key, padding, mask, own, theirs, causal, aligned, sliding, kept = seen
    visibility = Visibility(causal, query, key, aligned, padding, mask, sliding, kept, own, theirs)
    return Settings(visibility, *rest).problem(tensors)


def _fields(p: Problem) -> tuple[Any, ...]:
    s = p.visibility
    return (
        *p.tensors,
        *(s.query, s.key, s.padding, s.mask, s.query_documents, s.key_documents),
        *(s.causal, s.aligned, s.window, s.kept),
        *(p.window, p.dropout, p.cap, p.near_start),
    )


_FIELDS = (
    "Tensor q, Tensor k, Tensor v, Tensor? far_q, Tensor? far_k, Tensor? bias, Tensor? sink, "
    "Tensor query, Tensor key, Tensor? padding, Tensor? mask, Tensor? own, Tensor? theirs, "
    "bool causal, bool aligned, int? sliding, int kept, "
    "int? window, float dropout, float? cap, int near_start"
)


@torch.library.custom_op(
    "normattn::chunked", mutates_args=(), schema=f"({_FIELDS}) -> (Tensor, Tensor)"
)
def _forward(*fields: Any) -> tuple[Tensor, Tensor]:
    problem = _problem(*fields)
    seed = draw_seed(problem)
    out = forward_tiles(problem, Plan.of(problem), seed).contiguous()
    return out, torch.tensor(seed)


@_forward.register_fake
def _(*fields: Any) -> tuple[Tensor, Tensor]:
    q, _, v = fields[:3]
    return v.new_empty(*q.shape[:3], v.shape[-1]), torch.empty((), dtype=torch.int64)


@torch.library.custom_op(
    "normattn::chunked_backward",
    mutates_args=(),
    schema=f"(Tensor grad, Tensor seed, {_FIELDS}) -> Tensor[]",
)
def _backward(grad: Tensor, seed: Tensor, *fields: Any) -> list[Tensor]:
    problem = _problem(*fields)
    sums = backward_tiles(problem, Plan.of(problem), grad, int(seed.item())).all(problem)
    return [x.contiguous() for x in sums if x is not None]


@_backward.register_fake
def _(grad: Tensor, seed: Tensor, *fields: Any) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in fields[:_LEARNING] if x is not None]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.places = [isinstance(x, Tensor) for x in inputs]
    ctx.others = [None if isinstance(x, Tensor) else x for x in inputs]
    ctx.save_for_backward(output[1], *(x for x in inputs if isinstance(x, Tensor)))


def _autograd(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    seed, *saved = ctx.saved_tensors
    tensors = iter(saved)
    places = zip(ctx.places, ctx.others, strict=True)
    fields = [next(tensors) if is_tensor else other for is_tensor, other in places]
    sums = iter(_backward(grad, seed, *fields))
    found = [None if x is None else next(sums) for x in fields[:_LEARNING]]
    return (*found, *(None for _ in fields[_LEARNING:]))


_forward.register_autograd(_autograd, setup_context=_setup)


def chunked_node(problem: Problem) -> Float[Tensor, "b h t e"]:
    """`chunked` for a compiler."""
    out: Tensor = _forward(*_fields(problem))[0]
    return out
