"""KERPLELog and KERPLEPower: learned penalties by distance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

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
            # Not a change for autograd: a graph of an earlier call may still hold the parameter.
            value.data.clamp_(min=_LEAST, max=self.largest[name])

    def kept(
        self, learned: Mapping[str, Tensor], distance: Float[Tensor, " r"]
    ) -> tuple[Float[Tensor, "h 1"], Float[Tensor, "h 1"]]:
        """p and a within their range, in the dtype of the distances."""
        p, a = (
            learned[name].to(distance.dtype).clamp(min=_LEAST, max=self.largest[name])[:, None]
            for name in ("p", "a")
        )
        return p, a


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
