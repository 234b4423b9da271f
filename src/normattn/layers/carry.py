"""What one layer's score hands to the next: made by the stack of layers for each forward pass.

Legend: B batch, H query heads, G key heads, T queries, S keys, D score size, E value size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from normattn.errors import InputError
from normattn.kernels import Problem, attend
from normattn.kernels.carry import CarriedScores
from normattn.kernels.problem import Stack
from normattn.score import ScoreSpec


@runtime_checkable
class Carry(Protocol):
    """What the layers of one forward pass hand on, bottom first."""

    def attend(self, problem: Problem, backend: str = "auto") -> Float[Tensor, "b h t e"]:
        """softmax(score) · v of the next layer, whose score joins what is carried."""
        ...


class JoiningCarry(ABC):
    """A carry that makes one problem of the next layer's and of what is below, for any kernel."""

    @abstractmethod
    def join(self, problem: Problem) -> Problem:
        """The problem of the next layer, whose score joins what is carried."""

    def attend(self, problem: Problem, backend: str = "auto") -> Float[Tensor, "b h t e"]:
        """softmax(score) · v of the next layer."""
        return attend(self.join(problem), backend)


class ScoreCarry(JoiningCarry):
    """RealFormer: the sum of the scores of all layers so far, or its mean.

    The kernel that serves the lowest layer serves them all (`kernels.carry`).
    """

    def __init__(self, mean: bool = False, layers: int | None = None) -> None:
        self._scores = CarriedScores(mean, layers)

    def join(self, problem: Problem) -> Problem:
        """s = Σ_m q_m k_mᵀ."""
        return replace(problem, carry=self._scores)


class FeatureCarry(JoiningCarry):
    """ResidualQK: Q̃_n = Q_n + Q̃_{n−1} and K̃_n = K_n + K̃_{n−1}, of all keys also beside a cache.

    With `values` (ResidualQKV) the same of V.
    """

    def __init__(self, values: bool = False) -> None:
        self._names = ("q", "k", "v") if values else ("q", "k")
        self._stack: Stack | None = None
        self._sums: dict[str, Tensor] = {}

    def join(self, problem: Problem) -> Problem:
        """s = Q̃ K̃ᵀ, by any kernel."""
        stack = problem.stack
        if self._stack is not None and self._stack != stack:
            raise InputError(
                f"all layers that carry queries and keys must have the same shape, but below is "
                f"{self._stack} and here {stack}; make a new carry for each forward"
            )
        self._stack = stack
        own = {name: getattr(problem, name) for name in self._names}
        below = self._sums
        for name, x in own.items():
            if below and below[name].shape != x.shape:
                raise InputError(
                    f"all layers that carry {name} must have it in one shape, but below it is "
                    f"{tuple(below[name].shape)} and here {tuple(x.shape)}"
                )
        sums = {name: below[name] + x if below else x for name, x in own.items()}
        self._sums = sums
        return replace(problem, q=sums["q"], k=sums["k"], v=sums.get("v", problem.v))


def new_carry(spec: ScoreSpec, layers: int | None = None) -> JoiningCarry | None:
    """An empty carry for a score that takes over from the layers below; None for any other.

    One forward pass of a stack of `layers` needs one of its own. Residual scores are held in one
    buffer, or, where all layers together have few features, as those (`kernels.dispatch`).
    """
    if spec.carry is None:
        return None
    if spec.carry.carries == "features":
        return FeatureCarry(spec.carry.values)
    return ScoreCarry(spec.carry.mean, layers)


def refuse_carry(spec: ScoreSpec, carry: Carry | None) -> None:
    """Raise `InputError` where score and carry do not belong together."""
    if spec.carry is not None and carry is None:
        raise InputError(
            f"{spec.name} adds to what the layers below carry: pass carry=layers.new_carry(spec), "
            "one for each forward pass of the whole stack"
        )
    if spec.carry is None and carry is not None:
        raise InputError(f"a carry is given, but {spec.name} takes nothing from the layers below")
