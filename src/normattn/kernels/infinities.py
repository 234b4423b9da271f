"""Infinite queries and keys become NaN, so that a model that diverged shows it by every kernel.

NaN goes through products, softmax and sums as it is. Infinity does not: a key whose score is −∞
weighs nothing, and torch's flash kernel for a CPU makes finite numbers even of +∞ in half
precision. That kernel makes 0 of a short row of nothing but NaN as well: `dispatch` gives such
problems to tiles.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from normattn.kernels.place import on_cpu
from normattn.kernels.problem import Problem


def nan_for_infinite(x: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    """x + 0·x: NaN where x is infinite, x elsewhere; its derivative is 1."""
    return torch.add(x, x.detach(), alpha=0)


def without_infinities(
    x: Float[Tensor, "b h n d"], asked: Float[Tensor, "b h m d"] | None = None
) -> Float[Tensor, "b h n d"]:
    """`x` itself where it is finite, else with NaN for its infinities.

    On a CPU one sum finds out (of `asked`, if that is all that is new): about a hundredth of a
    forward at 64 tokens, a thousandth at 4,096. Under a compiler and torch.func, where no number
    can be read, all of x goes through `nan_for_infinite`, which a compiler fuses. On another device
    x stays as it is: to look would make the host wait, and to add 0·x would copy it.
    """
    told = x if asked is None else asked
    if readable(told):
        return nan_for_infinite(x) if spoilt(told) else x
    return x if _eager_elsewhere(told) else nan_for_infinite(x)


def _eager_elsewhere(x: Tensor) -> bool:
    """Whether x is on another device than a CPU, outside of a compiler."""
    return x.device.type != "cpu" and not torch.compiler.is_compiling()


def spoilt(x: Float[Tensor, "*n"]) -> bool:
    """Whether a tensor on a CPU holds what is not finite.

    A finite sum says no. Another one may have overflowed, so every number is asked then. False
    where a number cannot be read.
    """
    if not readable(x) or math.isfinite(x.detach().sum().item()):
        return False
    return not bool(x.detach().isfinite().all())


def certainly_finite(*tensors: Tensor) -> bool:
    """Whether every one is known to be finite; False where a number cannot be read."""
    return all(readable(x) and not spoilt(x) for x in tensors)


def readable(x: Float[Tensor, "*n"]) -> bool:
    """Whether the host may look at a number: on a CPU, outside of a compiler and torch.func."""
    if torch.compiler.is_compiling() or not on_cpu(x):
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(x)


def showing_divergence(problem: Problem) -> Problem:
    """The problem with NaN for infinite queries and keys.

    Beside a single query only the newest key is asked about: the others were when they came, and
    reading them once more would cost as much as attending to them.
    """

    def keys(x: Tensor) -> Tensor:
        if problem.q.shape[2] != 1:
            return without_infinities(x)
        newest = x[:, :, -1:]
        return without_infinities(x, newest) if readable(newest) else x

    q, k = without_infinities(problem.q), keys(problem.k)
    far_q = None if problem.far_q is None else without_infinities(problem.far_q)
    far_k = None if problem.far_k is None else keys(problem.far_k)
    same = q is problem.q and k is problem.k and far_q is problem.far_q and far_k is problem.far_k
    return problem if same else replace(problem, q=q, k=k, far_q=far_q, far_k=far_k)
