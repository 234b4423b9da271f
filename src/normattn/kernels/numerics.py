"""Numbers that need care: infinities, subnormal numbers, and second derivatives.

NaN goes through products, softmax and sums as it is. Infinity does not: a key whose score is −∞
weighs nothing, and torch's flash kernel for a CPU makes finite numbers even of +∞ in half
precision. So infinite queries and keys become NaN, and a model that diverged shows it by every
kernel of a CPU. Torch's flash kernel makes 0 of a short row of nothing but NaN as well: `dispatch`
gives such inputs to tiles.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from normattn.errors import InputError
from normattn.kernels.inputs import AttentionInputs

P = ParamSpec("P")
R = TypeVar("R")

_LEAST, _ONE = 5e-324, 1.0


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
    looked_at = x if asked is None else asked
    if readable(looked_at):
        return nan_for_infinite(x) if not_finite(looked_at) else x
    eager_elsewhere = looked_at.device.type != "cpu" and not torch.compiler.is_compiling()
    return x if eager_elsewhere else nan_for_infinite(x)


def not_finite(x: Float[Tensor, "*n"]) -> bool:
    """Whether a tensor on a CPU holds what is not finite.

    A finite sum says no. Another one may have overflowed, so every number is asked then. False
    where a number cannot be read.
    """
    if not readable(x) or math.isfinite(x.detach().sum().item()):
        return False
    return not bool(x.detach().isfinite().all())


def certainly_finite(*tensors: Tensor) -> bool:
    """Whether every one is known to be finite; False where a number cannot be read."""
    return all(readable(x) and not not_finite(x) for x in tensors)


def readable(x: Float[Tensor, "*n"]) -> bool:
    """Whether the host may look at a number: on a CPU, outside of a compiler and torch.func."""
    if torch.compiler.is_compiling() or x.device.type != "cpu":
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(x)


def showing_divergence(inputs: AttentionInputs) -> AttentionInputs:
    """The inputs with NaN for infinite queries and keys.

    Beside a single query only the newest key is looked at: the others were when they came, and
    reading them once more would cost as much as attending to them.
    """

    def keys(x: Tensor) -> Tensor:
        if inputs.q.shape[2] != 1:
            return without_infinities(x)
        newest = x[:, :, -1:]
        return without_infinities(x, newest) if readable(newest) else x

    q, k = without_infinities(inputs.q), keys(inputs.k)
    far_q = None if inputs.far_q is None else without_infinities(inputs.far_q)
    far_k = None if inputs.far_k is None else keys(inputs.far_k)
    same = q is inputs.q and k is inputs.k and far_q is inputs.far_q and far_k is inputs.far_k
    if not same:
        return replace(inputs, q=q, k=k, far_q=far_q, far_k=far_k)
    finite = inputs.bias is not None and inputs.q.shape[2] > 1 and readable(inputs.k)
    return replace(inputs, finite=True) if finite else inputs


def refuse_second_derivative(who: str, instead: str) -> None:
    """Raise `InputError` when called from a backward that is to be differentiated again.

    A hand-written backward has no derivative of its own. torch's `once_differentiable` says nothing
    where the incoming gradient is a constant, and the second derivative is then silently 0.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise InputError(f"{who} gives no second derivatives (create_graph=True); use {instead}")


def merge_by_lse(
    out: Float[Tensor, "b h t e"],
    lse: Float[Tensor, "b h t"],
    other_out: Float[Tensor, "b h t e"],
    other_lse: Float[Tensor, "b h t"],
) -> tuple[Float[Tensor, "b h t e"], Float[Tensor, "b h t"]]:
    """Attention over the keys of two shards, of the outputs and log-sum-exps over each.

    o = o₁ + (o₂ − o₁) · λ with λ = 1 / (1 + exp(ℓ₁ − ℓ₂)), and ℓ = ln(exp ℓ₁ + exp ℓ₂). A row that
    sees no key in either has ℓ = −∞ and the output 0.
    """
    # The difference of two −∞ would be NaN, and so would its gradient.
    least = torch.finfo(lse.dtype).min / 4
    mine, theirs = lse.clamp(min=least), other_lse.clamp(min=least)
    share = (theirs - mine).sigmoid()[..., None].to(out.dtype)
    nothing = (lse == -torch.inf) & (other_lse == -torch.inf)
    sums = torch.logaddexp(mine, theirs).masked_fill(nothing, -torch.inf)
    return torch.lerp(out, other_out, share), sums


def flushes() -> bool:
    """Whether this thread takes subnormal numbers for 0."""
    return _LEAST * _ONE == 0.0


def flushing(compute: Callable[P, R]) -> Callable[P, R]:
    """Decorator: subnormal numbers are 0 inside, and again what they were outside.

    A weight of exp(−90) is such a number in float32, and products of them are slow on an Intel
    core: ALiBi, whose bias makes very many, took three to four times as long. What is lost is below
    2^−126 of a value. It holds for the thread that computes; torch's further threads keep their
    own way.
    """

    @wraps(compute)
    def flushed(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling() or flushes() or not torch.set_flush_denormal(True):
            return compute(*args, **kwargs)
        try:
            return compute(*args, **kwargs)
        finally:
            torch.set_flush_denormal(False)

    return flushed
