"""Which kernel serves a problem: the fastest that can; a request none can serve is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from normattn.errors import InputError
from normattn.kernels.bias import bias_attention, why_not_bias
from normattn.kernels.chunked import chunked, why_not_chunked
from normattn.kernels.compiled import chunked_node
from normattn.kernels.fused import fused, why_not_fused
from normattn.kernels.problem import Problem
from normattn.kernels.reference import reference


@dataclass(frozen=True)
class Kernel:
    """A way to compute attention, and why it may be unable to serve a problem."""

    name: str
    run: Callable[[Problem], Tensor]
    why_not: Callable[[Problem], str | None]


def _tiles(problem: Problem) -> Tensor:
    return chunked_node(problem) if torch.compiler.is_compiling() else chunked(problem)


_BIAS = Kernel("bias", bias_attention, why_not_bias)
_FUSED = Kernel("fused", fused, why_not_fused)
_CHUNKED = Kernel("chunked", _tiles, why_not_chunked)
_REFERENCE = Kernel("reference", reference, lambda problem: None)
KERNELS: tuple[Kernel, ...] = (_FUSED, _BIAS, _CHUNKED, _REFERENCE)
BACKENDS: tuple[str, ...] = ("auto", *(kernel.name for kernel in KERNELS))
# Query rows at which tiles beat the stock kernel on a CPU in float32 (results/attention.json).
_TILES_WIN = range(256, 1025)


def _fastest_first(problem: Problem) -> tuple[Kernel, ...]:
    """On a CPU tiles are faster in half precision, and at middle lengths in float32.

    The stock kernel comes first on a GPU, for a single query, and where a compiler would have to
    unroll the tiles.
    """
    if torch.compiler.is_compiling():
        return (_FUSED, _CHUNKED, _REFERENCE)
    rows = problem.q.shape[2]
    stock = problem.q.device.type != "cpu" or rows == 1
    if not stock and (problem.q.element_size() == 2 or rows in _TILES_WIN):
        return (_BIAS, _CHUNKED, _FUSED, _REFERENCE)
    return KERNELS


def choose(problem: Problem, backend: str = "auto") -> Kernel:
    """The kernel of that name, or the fastest that can serve the problem.

    Raises `InputError` for an unknown name and for a kernel that cannot serve the problem.
    """
    if backend == "auto":
        return next(k for k in _fastest_first(problem) if k.why_not(problem) is None)
    for kernel in KERNELS:
        if kernel.name == backend:
            if reason := kernel.why_not(problem):
                raise InputError(f"the {backend} kernel cannot serve this: {reason}")
            return kernel
    raise InputError(f"unknown backend {backend!r}; expected one of {', '.join(BACKENDS)}")


def attend(problem: Problem, backend: str = "auto") -> Float[Tensor, "b h t e"]:
    """softmax(score) · v by the chosen kernel."""
    return choose(problem, backend).run(problem)
