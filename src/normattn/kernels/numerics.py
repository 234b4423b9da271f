"""Numbers that need care: infinities, subnormal numbers, and second derivatives.

NaN goes through products, softmax and sums unchanged. Infinity does not: a key whose score is −∞
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
from typing import Any, ParamSpec, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from normattn.errors import InputError
from normattn.kernels.inputs import AttentionInputs
from normattn.plain import traced

P = ParamSpec("P")
R = TypeVar("R")

_LEAST, _ONE = 5e-324, 1.0


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """The type in which scores, sums and statistics are computed: float32, or float64 itself."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def host_can_read(x: Float[Tensor, "*n"]) -> bool:
    """Whether the host may look at a number: on a CPU, outside of tracing and torch.func."""
    if traced() or x.device.type != "cpu":
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(x)


def finite(x: Float[Tensor, "*n"]) -> bool:
    """Whether every number is known to be finite; False where none can be read.

    A finite sum says yes. Another one may have overflowed, so every number is looked at then.
    """
    if not host_can_read(x):
        return False
    return math.isfinite(x.detach().sum().item()) or bool(x.detach().isfinite().all())


def nan_for_infinite(x: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    """x + 0·x: NaN where x is infinite, x elsewhere; its derivative is 1."""
    return torch.add(x, x.detach(), alpha=0)


def without_infinities(
    x: Float[Tensor, "b h n d"], looked_at: Float[Tensor, "b h m d"] | None = None
) -> Float[Tensor, "b h n d"]:
    """`x` itself where it is finite, else with NaN for its infinities.

    On a CPU one sum finds out (of `looked_at`, if that is all that is new): about a hundredth of a
    forward at 64 tokens, a thousandth at 4,096. Under a compiler and torch.func, where no number
    can be read, all of x goes through `nan_for_infinite`, which a compiler fuses. On another device
    x stays the same: to look would make the host wait, and to add 0·x would copy it.
    """
    new = x if looked_at is None else looked_at
    eager_elsewhere = new.device.type != "cpu" and not torch.compiler.is_compiling()
    return x if eager_elsewhere or finite(new) else nan_for_infinite(x)


def spread_infinities(inputs: AttentionInputs) -> AttentionInputs:
    """The inputs with NaN for infinite queries and keys.

    Beside a single query only the newest key is looked at: the others were when they came, and
    reading them once more would cost as much as attending to them.
    """
    step = inputs.q.shape[2] == 1
    sides = {name: getattr(inputs, name) for name in ("q", "k", "far_q", "far_k")}
    changed: dict[str, Any] = {}
    for name, x in sides.items():
        if x is None:
            continue
        newest = x[:, :, -1:] if step and name in ("k", "far_k") else x
        if newest is not x and not host_can_read(newest):
            continue
        found = without_infinities(x, newest)
        if found is not x:
            changed[name] = found
    if changed:
        return replace(inputs, **changed)
    known = inputs.bias is not None and not step and host_can_read(inputs.k)
    return replace(inputs, finite=True) if known else inputs


def refuse_second_derivative(kernel: str, instead: str) -> None:
    """Raise `InputError` when called from a backward that is to be differentiated again.

    A hand-written backward has no derivative of its own. torch's `once_differentiable` says nothing
    where the incoming gradient is a constant, and the second derivative is then silently 0.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise InputError(f"{kernel} gives no second derivatives (create_graph=True); use {instead}")


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
    2^−126 of a value. It holds for the thread that computes, not for torch's further threads.
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
