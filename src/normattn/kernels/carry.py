"""Scores that a stack of layers sums up, as kernels see them: one object for each forward pass.

Legend: B batch, H query heads, G key heads, T queries, S keys, D score size.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from normattn.errors import InputError
from normattn.kernels.problem import Stack
from normattn.kernels.score_buffer import Ledger

WAYS = ("carried", "concatenated", "reference")
"""The kernels that hold a sum: what the lowest layer begins, no other can go on with."""


class CarriedScores:
    """s_n = Σ_m q_m k_mᵀ, m = 1 … n, before masks, biases and caps; `mean`: over n.

    The kernel of the lowest layer decides how the sum is held, and all other layers follow:
    "carried" in one buffer that every layer updates in place, "concatenated" as the queries and
    keys of all layers, "reference" as one tensor known to autograd. `layers` is how many there
    will be, if that is known.
    """

    def __init__(self, mean: bool = False, layers: int | None = None) -> None:
        self.mean = mean
        self.layers = layers
        self.count = 0
        self.way: str | None = None
        self.stack: Stack | None = None
        self.ledger: Ledger | None = None
        self.token: Tensor | None = None
        self._sum: Tensor | None = None
        self._queries: list[Tensor] = []
        self._keys: list[Tensor] = []
        self._task = _backward_running()

    @property
    def share(self) -> float:
        """What the sum is multiplied with: 1, or 1/n for n layers."""
        return 1.0 / self.count if self.mean else 1.0

    def elsewhere(self, way: str) -> str | None:
        """Why a kernel cannot go on from the layers below; None where it can."""
        if self.way in (None, way) or way not in WAYS:
            return None
        return f"the layers below were summed by the {self.way} kernel, and one serves all layers"

    def enter(self, way: str, stack: Stack) -> None:
        """One more layer, from now on counted.

        Raises `InputError` for a layer of another shape, and for one that is computed once more by
        a backward, as activation checkpointing does.
        """
        if self._task != _backward_running():
            raise InputError(
                "carried scores cannot be computed once more in a backward, as activation "
                "checkpointing of single layers does: checkpoint the whole stack or none of it"
            )
        if self.stack is not None and self.stack != stack:
            raise InputError(
                f"all layers that carry scores must have the same shape, but below is {self.stack} "
                f"and here {stack}; make a new carry for each forward"
            )
        self.stack, self.way, self.count = stack, way, self.count + 1

    def stored(self, score: Float[Tensor, "b h t s"]) -> Float[Tensor, "b h t s"]:
        """The sum with this layer's scores, known to autograd."""
        self._sum = score if self._sum is None else self._sum + score
        return self._sum * self.share if self.mean else self._sum

    def features(
        self, q: Float[Tensor, "b h t d"], k: Float[Tensor, "b g s d"]
    ) -> tuple[Float[Tensor, "b h t nd"], Float[Tensor, "b g s nd"]]:
        """[q_1 … q_n] and [k_1 … k_n], whose product is the sum."""
        self._queries.append(q)
        self._keys.append(k)
        whole = torch.cat(self._queries, -1)
        return whole * self.share if self.mean else whole, torch.cat(self._keys, -1)


def _backward_running() -> int:
    """The number of the backward in which this runs; −1 outside of any."""
    if torch.compiler.is_compiling():
        return -1
    return int(torch._C._current_graph_task_id())
