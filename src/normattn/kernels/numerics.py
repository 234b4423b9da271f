"""Infinities, subnormal numbers, second derivatives, and merging by log-sum-exp.

NaN passes through products, softmax and sums, so a model that diverged shows it. Infinity does not:
a key whose score is −∞ gets weight 0, and torch's flash kernel for CPUs returns finite numbers for
+∞ in half precision. So on a CPU infinite queries and keys become NaN. That flash kernel also
returns 0 for a short row of nothing but NaN, so `dispatch` sends such inputs to the tiled kernel.
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
    """The dtype of scores, sums and statistics: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def host_can_read(x: Float[Tensor, "*n"]) -> bool:
    """Whether the numbers of x can be read without waiting: on a CPU, untraced, no torch.func."""
    if traced() or x.device.type != "cpu":
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(x)


def finite(x: Float[Tensor, "*n"]) -> bool:
    """Whether every number is known to be finite; False if they cannot be read."""
    if not host_can_read(x):
        return False
    # A finite sum proves it. Other sums may have overflowed, so then every number is checked.
    return math.isfinite(x.detach().sum().item()) or bool(x.detach().isfinite().all())


def nan_for_infinite(x: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    """x with NaN for infinities, as x + 0·x; its derivative is 1."""
    return torch.add(x, x.detach(), alpha=0)


def without_infinities(
    x: Float[Tensor, "b h n d"], checked: Float[Tensor, "b h m d"] | None = None
) -> Float[Tensor, "b h n d"]:
    """`x` if it is finite, else `x` with NaN for its infinities.

    On a CPU one sum decides: that of x, or of `checked` if only this part is new. It takes about 1
    % of a forward at 64 tokens and 0.1 % at 4,096. Under a compiler or torch.func, where no number
    can be read, `nan_for_infinite` is applied. On another device x is returned unchanged: a check
    would make the host wait, and adding 0·x would copy x.
    """
    checked = x if checked is None else checked
    unchecked = checked.device.type != "cpu" and not torch.compiler.is_compiling()
    return x if unchecked or finite(checked) else nan_for_infinite(x)


def spread_infinities(inputs: AttentionInputs) -> AttentionInputs:
    """The inputs with NaN for infinite queries and keys.

    With a single query only the newest key is checked. The others were checked in earlier steps,
    and reading them again would cost as much as attending to them.
    """
    decoding = inputs.q.shape[2] == 1
    changed: dict[str, Any] = {}
    for name in ("q", "k", "far_q", "far_k"):
        x = getattr(inputs, name)
        if x is None:
            continue
        newest = x[:, :, -1:] if decoding and name in ("k", "far_k") else x
        if newest is not x and not host_can_read(newest):
            continue
        cleaned = without_infinities(x, newest)
        if cleaned is not x:
            changed[name] = cleaned
    return replace(inputs, **changed) if changed else inputs


def refuse_second_derivative(kernel: str, instead: str) -> None:
    """Raise `InputError` in a backward that is itself differentiated.

    A hand-written backward has no derivative. torch's `once_differentiable` does not notice if the
    incoming gradient is a constant, and the second derivative is then silently 0.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise InputError(f"{kernel} gives no second derivatives (create_graph=True); use {instead}")


def merge_by_lse(
    out: Float[Tensor, "b h t e"],
    lse: Float[Tensor, "b h t"],
    other_out: Float[Tensor, "b h t e"],
    other_lse: Float[Tensor, "b h t"],
) -> tuple[Float[Tensor, "b h t e"], Float[Tensor, "b h t"]]:
    """Merge attention over two shards of the keys, from their outputs and log-sum-exps.

    o = o₁ + (o₂ − o₁) · λ with λ = 1 / (1 + exp(ℓ₁ − ℓ₂)), and ℓ = ln(exp ℓ₁ + exp ℓ₂). A row that
    sees no key in either shard has ℓ = −∞ and output 0.
    """
    # The difference of two −∞ and its gradient would be NaN.
    least = torch.finfo(lse.dtype).min / 4
    first, second = lse.clamp(min=least), other_lse.clamp(min=least)
    share = (second - first).sigmoid()[..., None].to(out.dtype)
    empty = (lse == -torch.inf) & (other_lse == -torch.inf)
    merged_lse = torch.logaddexp(first, second).masked_fill(empty, -torch.inf)
    return torch.lerp(out, other_out, share), merged_lse


def flushes() -> bool:
    """Whether this thread treats subnormal numbers as 0."""
    return _LEAST * _ONE == 0.0


def flushing(compute: Callable[P, R]) -> Callable[P, R]:
    """Decorator that treats subnormal numbers as 0 during a call, in the calling thread only.

    A weight of exp(−90) is subnormal in float32, and Intel cores multiply such numbers slowly:
    ALiBi, whose bias makes many, took three to four times as long. The error is below 2^−126 of a
    value.
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
