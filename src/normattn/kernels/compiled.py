"""The chunked kernel as one node of a compiled graph: a compiler need not unroll its tiles.

Each operation takes a problem field by field, as an operator's schema wants it.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from normattn.kernels.chunked import backward_tiles, draw_seed, forward_tiles
from normattn.kernels.problem import LEARNED, Problem
from normattn.kernels.tiles import Plan
from normattn.kernels.visibility import Visibility


def _type(annotation: object) -> str:
    """The type of a field as a schema writes it; the annotation is a string."""
    text = str(annotation)
    name = "Tensor" if "Tensor" in text else text.split(" ")[0]
    return f"{name}?" if text.endswith("| None") else name


# What is no number or tensor the chunked kernel does not serve.
_APART = ("visibility", "carry", "pairs", "normaliser", "selection")
_OWN = {x.name: _type(x.type) for x in fields(Problem) if x.name not in _APART}
_SEEN = {x.name: _type(x.type) for x in fields(Visibility)}
_TYPES = {**_OWN, **{f"visible_{name}": kind for name, kind in _SEEN.items()}}
_FIELDS = ", ".join(f"{kind} {name}" for name, kind in _TYPES.items())


def _problem(*values: Any) -> Problem:
    seen = Visibility(**dict(zip(_SEEN, values[len(_OWN) :], strict=True)))
    return Problem(visibility=seen, **dict(zip(_OWN, values[: len(_OWN)], strict=True)))


def _fields(p: Problem) -> tuple[Any, ...]:
    own = [getattr(p, name) for name in _OWN]
    return (*own, *[getattr(p.visibility, name) for name in _SEEN])


@torch.library.custom_op(
    "normattn::chunked", mutates_args=(), schema=f"({_FIELDS}) -> (Tensor, Tensor)"
)
def _forward(*values: Any) -> tuple[Tensor, Tensor]:
    problem = _problem(*values)
    seed = draw_seed(problem)
    out = forward_tiles(problem, Plan.of(problem), seed).contiguous()
    return out, torch.tensor(seed)


@_forward.register_fake
def _(*values: Any) -> tuple[Tensor, Tensor]:
    p = _problem(*values)
    return p.v.new_empty(*p.q.shape[:3], p.v.shape[-1]), torch.empty((), dtype=torch.int64)


@torch.library.custom_op(
    "normattn::chunked_backward",
    mutates_args=(),
    schema=f"(Tensor grad, Tensor seed, {_FIELDS}) -> Tensor[]",
)
def _backward(grad: Tensor, seed: Tensor, *values: Any) -> list[Tensor]:
    problem = _problem(*values)
    sums = backward_tiles(problem, Plan.of(problem), grad, int(seed.item())).all(problem)
    return [x.contiguous() for x in sums if x is not None]


@_backward.register_fake
def _(grad: Tensor, seed: Tensor, *values: Any) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in _problem(*values).tensors if x is not None]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.places = [isinstance(x, Tensor) for x in inputs]
    ctx.others = [None if isinstance(x, Tensor) else x for x in inputs]
    ctx.save_for_backward(output[1], *(x for x in inputs if isinstance(x, Tensor)))


def _autograd(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    seed, *saved = ctx.saved_tensors
    given = iter(saved)
    places = zip(ctx.places, ctx.others, strict=True)
    values = [next(given) if is_tensor else other for is_tensor, other in places]
    sums = iter(_backward(grad, seed, *values))
    tensors = zip(LEARNED, _problem(*values).tensors, strict=True)
    gradients = {name: next(sums) for name, x in tensors if x is not None}
    return tuple(gradients.get(name) for name in _TYPES)


_forward.register_autograd(_autograd, setup_context=_setup)


def chunked_node(problem: Problem) -> Float[Tensor, "b h t e"]:
    """`chunked` for a compiler."""
    out: Tensor = _forward(*_fields(problem))[0]
    return out
