"""What a layer's score takes from the layers below: scores, or queries, keys and values.

`residual_layers(spec, layers)` gives one object to each layer. A layer that runs again, in another
forward or in the recomputation of activation checkpointing, gets from below what it got before.

Legend: B batch, H query heads, G key heads, T queries, S keys, D score size, E value size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from weakref import ref

import torch
from jaxtyping import Float
from torch import Tensor

from normattn.errors import InputError
from normattn.kernels import AttentionInputs, attend
from normattn.kernels.inputs import Stack
from normattn.kernels.residual import CarriedScores
from normattn.score import ScoreSpec


class ResidualLayer(ABC):
    """The residual of one layer of a stack."""

    @abstractmethod
    def join(self, problem: AttentionInputs) -> AttentionInputs:
        """The problem of this layer together with what the layers below hand on."""

    def attend(self, problem: AttentionInputs, backend: str = "auto") -> Float[Tensor, "b h t e"]:
        """softmax(score) · v with the residual in the score."""
        return attend(self.join(problem), backend)


class ScoreResidual(ResidualLayer):
    """RealFormer: s_n = Σ_m q_m k_mᵀ, m ≤ n, or its mean over the layers.

    The kernel of the lowest layer serves all layers (`kernels.residual`).
    """

    def __init__(self, scores: CarriedScores, layer: int) -> None:
        self._scores, self._layer = scores, layer

    def join(self, problem: AttentionInputs) -> AttentionInputs:
        """The problem with the sum of the scores below."""
        self._scores.begin(self._layer)
        return replace(problem, carry=self._scores)


class FeatureResidual(ResidualLayer):
    """ResidualQK: Q̃_n = Q_n + Q̃_{n−1} and K̃_n = K_n + K̃_{n−1}, of all keys also beside a cache.

    With `values` (ResidualQKV) the same of V. Without gradients only the newest layer's sums are
    held.
    """

    def __init__(self, values: bool = False, below: FeatureResidual | None = None) -> None:
        self._names = ("q", "k", "v") if values else ("q", "k")
        self._below = below
        self._above: ref[FeatureResidual] | None = None
        self._stack: Stack | None = None
        self._sums: dict[str, Tensor] | None = None
        if below is not None:
            below._above = ref(self)

    def join(self, problem: AttentionInputs) -> AttentionInputs:
        """The problem with the summed queries and keys, for any kernel."""
        own = {name: getattr(problem, name) for name in self._names}
        if self._below is None:
            self._forget_above()
            sums = own
        else:
            below = self._below.sums(problem.stack, own)
            sums = {name: below[name] + x for name, x in own.items()}
            if not torch.is_grad_enabled():
                self._below._sums = None
        self._stack, self._sums = problem.stack, sums
        return replace(problem, q=sums["q"], k=sums["k"], v=sums.get("v", problem.v))

    def sums(self, stack: Stack, own: dict[str, Tensor]) -> dict[str, Tensor]:
        """Q̃ and K̃ (and Ṽ) of this layer, for the one above, whose own are given."""
        if self._sums is None:
            raise InputError(
                "the layer below has handed no queries and keys on: run all layers of the stack "
                "in every forward, bottom first; activation checkpointing needs use_reentrant=False"
            )
        if self._stack != stack:
            raise InputError(
                f"all layers that share residual queries and keys must have the same shape, but "
                f"below is {self._stack} and here {stack}"
            )
        for name, x in own.items():
            if self._sums[name].shape != x.shape:
                raise InputError(
                    f"all layers that share a residual {name} must have it in one shape, but below "
                    f"it is {tuple(self._sums[name].shape)} and here {tuple(x.shape)}"
                )
        return self._sums

    def _forget_above(self) -> None:
        """Begin a forward: a layer that it leaves out must not be read from the last one."""
        if torch.compiler.is_compiling() or torch._C._current_graph_task_id() != -1:
            return
        above = None if self._above is None else self._above()
        while above is not None:
            above._sums = None
            above = None if above._above is None else above._above()


def residual_layers(spec: ScoreSpec, layers: int) -> tuple[ResidualLayer, ...] | None:
    """The residual of each of `layers` layers, bottom first; None for a score without one.

    Residual scores are held in one buffer, or, where all layers together have few features, as
    queries and keys (`kernels.dispatch`).
    """
    if spec.residual is None:
        return None
    if spec.residual.carries == "scores":
        scores = CarriedScores(spec.residual.mean, layers)
        return tuple(ScoreResidual(scores, layer) for layer in range(layers))
    made: list[FeatureResidual] = []
    for layer in range(layers):
        made.append(FeatureResidual(spec.residual.values, made[layer - 1] if layer else None))
    return tuple(made)


def check_residual(spec: ScoreSpec, residual: object) -> None:
    """Raise `InputError` where score and residual do not belong together."""
    if spec.residual is None and residual is not None:
        raise InputError(
            f"a residual is given, but {spec.name} takes nothing from the layers below"
        )
    if spec.residual is not None and not isinstance(residual, ResidualLayer):
        raise InputError(
            f"{spec.name} adds to what the layers below hand on: pass residual=residual[n] to "
            "layer n, with residual = layers.residual_layers(spec, layers=…)"
        )
