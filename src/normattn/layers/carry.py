"""What one layer's score hands to the next: made by the stack of layers for each forward pass."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from normattn.errors import InputError
from normattn.kernels import Problem
from normattn.score import ScoreSpec


@runtime_checkable
class Carry(Protocol):
    """What the layers of one forward pass hand on, bottom first."""

    def attend(self, problem: Problem, backend: str = "auto") -> Float[Tensor, "b h t e"]:
        """softmax(score) · v of the next layer, whose score joins what is carried."""
        ...


def new_carry(spec: ScoreSpec) -> Carry | None:
    """An empty carry for a score that takes over from the layers below; None for any other."""
    if spec.carry is None:
        return None
    raise InputError(f"{spec.name} carries scores from layer to layer, and no layer serves that")
