"""What a layer's score takes from the layers below: scores, or queries, keys and values.

Legend: B batch, H query heads, T queries, E value size.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from normattn.errors import InputError
from normattn.kernels import AttentionInputs
from normattn.kernels.residual_scores import ResidualScores
from normattn.score import ScoreSpec
from normattn.score.parts.residual import ValueResidual


class ResidualLayer:
    """The residual of one layer of a stack, which `residual_layers` makes.

    A layer that runs again, in another forward or in the recomputation of activation checkpointing,
    gets from below what it got before.
    """

    def __init__(self, sums: ResidualScores | FeatureSums | FirstValues, layer: int) -> None:
        self._sums, self._layer = sums, layer

    def join(self, inputs: AttentionInputs) -> AttentionInputs:
        """The inputs of this layer together with what the layers below hand on."""
        return self._sums.join(inputs, self._layer)


class FeatureSums:
    """ResidualQK: Q̃_n = Q_n + Q̃_{n−1} and K̃_n = K_n + K̃_{n−1}, for all keys, also with a cache.

    `names` has "v" as well for ResidualQKV. Without gradients only the newest sums are held.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names
        self._sums: dict[int, dict[str, Tensor]] = {}

    def join(self, inputs: AttentionInputs, layer: int) -> AttentionInputs:
        """The inputs with the summed queries and keys, for any kernel."""
        sums: dict[str, Tensor] = {name: getattr(inputs, name) for name in self._names}
        if layer:
            below = self._below(layer, sums)
            sums = {name: below[name] + x for name, x in sums.items()}
            if not torch.is_grad_enabled():
                del self._sums[layer - 1]
        elif torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1:
            # A forward begins: a layer that it leaves out must not be read from the last one.
            self._sums.clear()
        self._sums[layer] = sums
        return replace(inputs, q=sums["q"], k=sums["k"], v=sums.get("v", inputs.v))

    def _below(self, layer: int, own: dict[str, Tensor]) -> dict[str, Tensor]:
        if layer - 1 not in self._sums:
            raise InputError(
                "the layer below has passed on no queries and keys: run all layers of the stack "
                "in every forward, bottom first; activation checkpointing needs "
                "use_reentrant=False"
            )
        sums = self._sums[layer - 1]
        for name, x in own.items():
            if sums[name].shape != x.shape:
                raise InputError(
                    f"all layers that share a residual {name} must have it in the same shape, but "
                    f"below it is {tuple(sums[name].shape)} and here {tuple(x.shape)}"
                )
        return sums


class FirstValues:
    """ValueResidual: V′_n = μ·V_1 + (1 − μ)·V_n, for all keys, also with a cache."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._first: Tensor | None = None

    def join(self, inputs: AttentionInputs, layer: int) -> AttentionInputs:
        """The inputs with mixed values, for any kernel; those of the lowest layer are kept."""
        if layer == 0:
            self._first = inputs.v
            return inputs
        if self._first is None or self._first.shape != inputs.v.shape:
            found = "none" if self._first is None else f"values of {tuple(self._first.shape)}"
            raise InputError(
                f"the lowest layer has passed on {found}, and this one has values of "
                f"{tuple(inputs.v.shape)}: run all layers of the stack in every forward, bottom "
                "first, with one shape"
            )
        return replace(inputs, v=torch.lerp(inputs.v, self._first, self._share))


def residual_layers(spec: ScoreSpec, layers: int) -> tuple[ResidualLayer, ...] | None:
    """The residual of each of `layers` layers, bottom first; None for a score without one.

    How RealFormer's scores s_n = Σ_m q_m k_mᵀ, m ≤ n, or their mean over the layers, are held is
    decided by the kernel of the lowest layer (`kernels.residual`).
    """
    if spec.residual is None:
        return None
    sums: ResidualScores | FeatureSums | FirstValues
    if spec.residual.summed == "scores":
        sums = ResidualScores(spec.residual.mean)
    elif isinstance(spec.residual, ValueResidual):
        sums = FirstValues(spec.residual.share)
    else:
        sums = FeatureSums(("q", "k", "v") if spec.residual.values else ("q", "k"))
    return tuple(ResidualLayer(sums, layer) for layer in range(layers))
