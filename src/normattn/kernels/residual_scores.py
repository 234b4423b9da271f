"""The state of residual scores during one forward pass: how the sum is stored, and by which kernel.

Legend: B batch, H query heads, G key heads, T queries, S keys, D score size, n layers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from normattn.errors import InputError

Inputs = TypeVar("Inputs", bound=Any)
"""`AttentionInputs`, which imports this file."""


class ResidualScores:
    """s_n = Σ_m q_m k_mᵀ, m = 1 … n, before masks, biases and caps; with `mean` divided by n.

    `kernels.residual` describes the two ways to store the sum. The concatenated one allows
    activation checkpointing.
    """

    def __init__(self, mean: bool = False) -> None:
        self.mean = mean
        self.count = 0
        self.kernel: str | None = None
        self.sizes: tuple[Any, ...] | None = None
        # Used by the residual kernel: its buffer, and the tensor that chains the layers.
        self.buffer: Any = None
        self.token: Tensor | None = None
        self._queries: list[Tensor] = []
        self._keys: list[Tensor] = []
        self._next, self._joined = 0, False
        self._backward_id = _current_backward()
        self._had_grad = torch.is_grad_enabled()

    @property
    def share(self) -> float:
        """The factor of the sum: 1, or 1/n for n layers."""
        return 1.0 / self.count if self.mean else 1.0

    def join(self, inputs: Inputs, layer: int) -> Inputs:
        """Add these scores to the inputs of `layer`, from 0. Layer 0 starts a new forward."""
        if layer == 0 and self._backward_id == _current_backward():
            self.kernel = self.sizes = self.buffer = self.token = None
            self._queries, self._keys = [], []
            self._had_grad = torch.is_grad_enabled()
        self._next, self._joined = layer, True
        return replace(inputs, residual_scores=self)

    def why_not(self, kernel: str) -> str | None:
        """Why a kernel cannot continue the sum of the layers below; None if it can."""
        if kernel == "residual" and torch.compiler.is_compiling():
            return "a compiler takes no buffer that is undone in the backward"
        if self.kernel is None or (self.kernel == "residual") == (kernel == "residual"):
            return None
        return f"the layers below were summed by the {self.kernel} kernel, which serves all layers"

    def start_layer(self, kernel: str, inputs: Any) -> None:
        """Start the next layer.

        Raises `InputError` for a layer of another shape, or if a layer below has not run. Refuses
        recomputation in a backward if the sum is in a buffer or the forward had no gradients.
        """
        if self._backward_id != _current_backward():
            if kernel == "residual" or not self._joined:
                raise InputError(
                    "activation checkpointing of single layers cannot fill the buffer of "
                    "residual scores again in the backward pass: checkpoint the whole stack, or "
                    "use backend='concatenated'"
                )
            if not self._had_grad and torch.is_grad_enabled():
                raise InputError(
                    "residual scores have no gradient if the forward pass ran without one: "
                    "activation checkpointing needs use_reentrant=False"
                )
        q, k = inputs.q, inputs.k
        sizes = (*q.shape[:2], k.shape[1], q.shape[2], k.shape[2], q.dtype)
        if self.sizes not in (None, sizes):
            raise InputError(
                "all layers that share residual scores must have the same shape, but (batch, query "
                f"heads, key heads, queries, keys, dtype) below are {self.sizes} and here {sizes}"
            )
        if kernel == "concatenated" and self._next > len(self._keys):
            raise InputError(
                f"layer {self._next} adds to the scores of the layers below, which have not all "
                "run: run all layers of the stack in every forward, bottom first"
            )
        self.sizes, self.kernel, self.count = sizes, kernel, self._next + 1
        self._next, self._joined = self.count, False

    def concatenate(self, inputs: Inputs) -> Inputs:
        """The inputs with [q_1 … q_n] and [k_1 … k_n], whose product is the sum or mean."""
        self.start_layer("concatenated", inputs)
        layer = slice(self.count - 1, self.count)
        self._queries[layer], self._keys[layer] = [inputs.q], [inputs.k]
        q, k = (torch.cat(x[: self.count], -1) for x in (self._queries, self._keys))
        q = q * self.share if self.mean else q
        return replace(inputs, q=q, k=k, residual_scores=None)


def _current_backward() -> int:
    """The id of the running backward; −1 if there is none."""
    if torch.compiler.is_compiling():
        return -1
    return int(torch._C._current_graph_task_id())
