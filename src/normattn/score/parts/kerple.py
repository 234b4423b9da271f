"""KERPLELog and KERPLEPower: learned penalties by distance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from normattn.plain import transformed
from normattn.score.outer_parts import BiasPart
from normattn.score.registry import register

_LEAST = 0.01


@dataclass(frozen=True)
class _Kerple(BiasPart):
    """What both have: p and a per head, drawn from U(0, `drawn`) at first, kept in a range."""

    source: ClassVar[str] = "arXiv 2205.09921"
    largest: ClassVar[Mapping[str, float | None]] = {"p": None, "a": None}
    drawn: ClassVar[Mapping[str, float]]

    def learned(self, heads: int, head_dim: int) -> dict[str, Float[Tensor, "h"]]:
        """p and a, drawn from torch's global generator."""
        first = {name: self.drawn[name] * torch.rand(heads) for name in ("p", "a")}
        return {name: value.clamp(min=_LEAST) for name, value in first.items()}

    def project(self, learned: Mapping[str, Tensor]) -> None:
        """Clamp p and a in place."""
        for name, value in learned.items():
            value.clamp_(min=_LEAST, max=self.largest[name])

    def kept(
        self, learned: Mapping[str, Tensor], distance: Float[Tensor, " r"]
    ) -> tuple[Float[Tensor, "h 1"], Float[Tensor, "h 1"]]:
        """p and a within their range, in the dtype of the distances."""
        p, a = (
            bounded(learned[name].to(distance.dtype), _LEAST, self.largest[name])[:, None]
            for name in ("p", "a")
        )
        return p, a


class _Bounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, low: float, high: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.low, ctx.high = low, high
        return x.clamp(low, high)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        # A step goes against the gradient.
        passes = ((x >= ctx.low) | (grad < 0)) & ((x <= ctx.high) | (grad > 0))
        return torch.where(passes, grad, 0.0), None, None


def bounded(x: Tensor, low: float, high: float | None) -> Tensor:
    """x clamped to [low, high]; where x has left that range, a gradient that leads back passes.

    The gradient of a plain clamp is 0 there, so that an optimiser's step beyond a bound would be
    its last. (torch.func and forward-mode derivatives are those of the plain clamp.)
    """
    most = float("inf") if high is None else high
    if transformed():
        return x.clamp(low, most)
    y: Tensor = _Bounded.apply(x, low, most)  # type: ignore[no-untyped-call]
    return y


@register
@dataclass(frozen=True)
class KERPLELog(_Kerple):
    """b(h, r) = −p_h·ln(1 + a_h·r), p and a learned per head, at least 0.01 (arXiv 2205.09921).

    p starts at U(0, 2), a at U(0, 1), as in the authors' code.
    """

    name: ClassVar[str] = "KERPLELog"
    summary: ClassVar[str] = "a learned penalty that grows with the logarithm of distance"
    equation: ClassVar[str] = "b = −p_h·ln(1 + a_h·|i−j|)"
    drawn: ClassVar[Mapping[str, float]] = {"p": 2.0, "a": 1.0}

    def values(
        self, distance: Float[Tensor, " r"], heads: int, learned: Mapping[str, Tensor]
    ) -> Float[Tensor, "h r"]:
        """−p_h·ln(1 + a_h·r)."""
        p, a = self.kept(learned, distance)
        return -p * torch.log1p(a * distance)


@register
@dataclass(frozen=True)
class KERPLEPower(_Kerple):
    """b(h, r) = −p_h·r^(a_h), p ≥ 0.01 and 0.01 ≤ a ≤ 2 learned per head (arXiv 2205.09921).

    The coefficient p starts at U(0, 1), the exponent a at U(0, 2), as in the authors' code.
    """

    name: ClassVar[str] = "KERPLEPower"
    summary: ClassVar[str] = "a learned penalty that grows with a power of distance"
    equation: ClassVar[str] = "b = −p_h·|i−j|^(a_h)"
    largest: ClassVar[Mapping[str, float | None]] = {"p": None, "a": 2.0}
    drawn: ClassVar[Mapping[str, float]] = {"p": 1.0, "a": 2.0}

    def values(
        self, distance: Float[Tensor, " r"], heads: int, learned: Mapping[str, Tensor]
    ) -> Float[Tensor, "h r"]:
        """−p_h·r^(a_h)."""
        p, a = self.kept(learned, distance)
        # At 0 the power's second derivative by a would be 0·∞.
        return -p * torch.where(distance > 0, distance.clamp(min=1) ** a, 0.0)
