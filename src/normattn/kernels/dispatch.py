"""Which kernel serves a problem: the fastest that can; a request none can serve is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from normattn.errors import InputError
from normattn.kernels.chunked import chunked, why_not_chunked
from normattn.kernels.fused import fused, why_not_fused
from normattn.kernels.problem import Problem
from normattn.kernels.reference import reference


@dataclass(frozen=True)
class Kernel:
    """A way to compute attention, and why it may be unable to serve a problem."""

    name: str
    run: Callable[[Problem], Tensor]
    why_not: Callable[[Problem], str | None]


# In the order in which `auto` tries them.
KERNELS: tuple[Kernel, ...] = (
    Kernel("fused", fused, why_not_fused),
    Kernel("chunked", chunked, why_not_chunked),
    Kernel("reference", reference, lambda problem: None),
)
BACKENDS: tuple[str, ...] = ("auto", *(kernel.name for kernel in KERNELS))


def choose(problem: Problem, backend: str = "auto") -> Kernel:
    """The kernel of that name, or the first that can serve the problem.

    Raises `InputError` for an unknown name and for a kernel that cannot serve the problem.
    """
    if backend == "auto":
        return next(kernel for kernel in KERNELS if kernel.why_not(problem) is None)
    for kernel in KERNELS:
        if kernel.name == backend:
            if reason := kernel.why_not(problem):
                raise InputError(f"the {backend} kernel cannot serve this: {reason}")
            return kernel
    raise InputError(f"unknown backend {backend!r}; expected one of {', '.join(BACKENDS)}")


def attend(problem: Problem, backend: str = "auto") -> Float[Tensor, "b h t e"]:
    """softmax(score) · v by the chosen kernel."""
    return choose(problem, backend).run(problem)
