"""Scores that layers sum up: how the sum of one forward pass is held, and by which kernel.

Legend: B batch, H query heads, G key heads, T queries, S keys, D score size, n layers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from normattn.errors import InputError

Inputs = TypeVar("Inputs", bound=Any)
"""`AttentionInputs`, which name this file: it cannot name them."""

_HOLDING = ("residual", "concatenated", "reference")


class Stack(NamedTuple):
    """What all layers that share residual scores have in common."""

    batch: int
    query_heads: int
    key_heads: int
    queries: int
    keys: int
    dtype: torch.dtype

    def __str__(self) -> str:
        pairs = zip(self._fields, self, strict=True)
        return ", ".join(f"{value} {name.replace('_', ' ')}" for name, value in pairs)


class ResidualScores:
    """s_n = Σ_m q_m k_mᵀ, m = 1 … n, before masks, biases and caps; `mean`: over n.

    The kernel of the lowest layer decides how the sum is held, and all other layers follow:
    "residual" in one buffer that every layer updates in place, "concatenated" as the queries and
    keys of all layers, "reference" as one tensor known to autograd. The last two serve a layer
    that a backward computes once more.
    """

    def __init__(self, mean: bool = False) -> None:
        self.mean = mean
        self.count = 0
        self.kernel: str | None = None
        self.stack: Stack | None = None
        # Of the kernel that holds the sum in a buffer: that, and what chains its layers.
        self.buffer: Any = None
        self.token: Tensor | None = None
        self._sums: list[Tensor | None] = []
        self._queries: list[Tensor] = []
        self._keys: list[Tensor] = []
        self._next, self._numbered = 0, False
        self._task = _backward_running()
        self._learning = torch.is_grad_enabled()

    @property
    def share(self) -> float:
        """What the sum is multiplied with: 1, or 1/n for n layers."""
        return 1.0 / self.count if self.mean else 1.0

    def join(self, inputs: Inputs, layer: int) -> Inputs:
        """The inputs of `layer`, from 0, which is the next; layer 0 begins a forward of its own."""
        if layer == 0 and self._task == _backward_running():
            self.kernel = self.stack = self.buffer = self.token = None
            self._sums, self._queries, self._keys = [], [], []
            self._learning = torch.is_grad_enabled()
        self._next, self._numbered = layer, True
        return replace(inputs, residual_scores=self)

    def why_not(self, kernel: str) -> str | None:
        """Why a kernel cannot continue from the layers below; None if it can."""
        if self.kernel in (None, kernel) or kernel not in _HOLDING:
            return None
        return f"the layers below were summed by the {self.kernel} kernel, which serves all layers"

    def enter(self, kernel: str, stack: Stack) -> None:
        """The next layer enters.

        Raises `InputError` for a layer of another shape, for one whose layer below has not run, and
        for one that a backward computes once more where the sum is held in a buffer, or where the
        forward ran without gradients.
        """
        if self._task != _backward_running():
            if kernel == "residual" or not self._numbered:
                raise InputError(
                    "activation checkpointing of single layers cannot fill the buffer of "
                    "residual scores again in the backward pass: checkpoint the whole stack, or "
                    "use backend='concatenated'"
                )
            if not self._learning and torch.is_grad_enabled():
                raise InputError(
                    "residual scores have no gradient if the forward pass ran without one: "
                    "activation checkpointing needs use_reentrant=False"
                )
        if self.stack is not None and self.stack != stack:
            raise InputError(
                "all layers that share residual scores must have the same shape, but "
                f"below is {self.stack} and here {stack}; each forward needs new `ResidualScores`"
            )
        held = {"reference": len(self._sums), "concatenated": len(self._keys)}
        if self._next > held.get(kernel, self._next):
            raise InputError(
                f"layer {self._next} adds to the scores of the layers below, which have not all "
                "run: run all layers of the stack in every forward, bottom first"
            )
        self.stack, self.kernel, self.count = stack, kernel, self._next + 1
        self._next, self._numbered = self.count, False

    def stored(self, score: Float[Tensor, "b h t s"]) -> Float[Tensor, "b h t s"]:
        """The sum with this layer's scores, known to autograd."""
        layer = self.count - 1
        below = self._sums[layer - 1] if layer else None
        whole = score if below is None else below + score
        self._sums[layer : layer + 1] = [whole]
        if layer and not torch.is_grad_enabled():
            self._sums[layer - 1] = None
        return whole * self.share if self.mean else whole

    def features(
        self, q: Float[Tensor, "b h t d"], k: Float[Tensor, "b g s d"]
    ) -> tuple[Float[Tensor, "b h t nd"], Float[Tensor, "b g s nd"]]:
        """[q_1 … q_n] and [k_1 … k_n], whose product is the sum."""
        layer = slice(self.count - 1, self.count)
        self._queries[layer], self._keys[layer] = [q], [k]
        whole = torch.cat(self._queries[: self.count], -1)
        return whole * self.share if self.mean else whole, torch.cat(self._keys[: self.count], -1)


def _backward_running() -> int:
    """The number of the backward in which this runs; −1 outside of any."""
    if torch.compiler.is_compiling():
        return -1
    return int(torch._C._current_graph_task_id())
