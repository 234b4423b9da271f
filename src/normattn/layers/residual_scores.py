"""Residual attention: a layer's scores, or q, k and v, are combined with those of layers below."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from normattn.errors import InputError
from normattn.kernels import AttentionInputs
from normattn.kernels.residual_scores import ResidualScores
from normattn.score import ScoreSpec
from normattn.score.parts.residual import ValueResidual
from normattn.score.spec import as_spec


class ResidualLayer:
    """The residual of one layer of a stack, made by `residual_layers`.

    A layer that runs again, in another forward or for activation checkpointing, uses it again.
    """

    def __init__(self, sums: ResidualScores | FeatureSums | FirstValues, layer: int) -> None:
        self._sums, self._layer = sums, layer

    def join(self, inputs: AttentionInputs) -> AttentionInputs:
        """Combine the inputs of this layer with the layers below."""
        return self._sums.join(inputs, self._layer)


class FeatureSums:
    """ResidualQK: Q̃_n = Q_n + Q̃_{n−1} and K̃_n = K_n + K̃_{n−1}.

    `names` includes "v" for ResidualQKV. Without gradients only the newest sums are kept.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names
        self._sums: dict[int, dict[str, Tensor]] = {}

    def join(self, inputs: AttentionInputs, layer: int) -> AttentionInputs:
        """Replace queries and keys by their sums over the layers so far."""
        sums: dict[str, Tensor] = {name: getattr(inputs, name) for name in self._names}
        if layer:
            below = self._sums.get(layer - 1)
            if below is None or any(below[name].shape != x.shape for name, x in sums.items()):
                raise InputError(
                    "the layer below has passed on no queries and keys of the same shape: run all "
                    "layers of the stack in every forward, bottom first; activation checkpointing "
                    "needs use_reentrant=False"
                )
            sums = {name: below[name] + x for name, x in sums.items()}
            if not torch.is_grad_enabled():
                del self._sums[layer - 1]
        elif torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1:
            # A new forward (no backward runs): sums of the previous one must not be used.
            self._sums.clear()
        self._sums[layer] = sums
        return replace(inputs, q=sums["q"], k=sums["k"], v=sums.get("v", inputs.v))


class FirstValues:
    """ValueResidual: V′_n = μ·V_1 + (1 − μ)·V_n."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._first: Tensor | None = None

    def join(self, inputs: AttentionInputs, layer: int) -> AttentionInputs:
        """Store the values of the lowest layer, and mix them into those of the others."""
        if layer == 0:
            self._first = inputs.v
            return inputs
        if self._first is None or self._first.shape != inputs.v.shape:
            raise InputError(
                "the lowest layer has passed on no values of the same shape: run all layers of the "
                "stack in every forward, bottom first"
            )
        return replace(inputs, v=torch.lerp(inputs.v, self._first, self._share))


def residual_layers(spec: ScoreSpec | str, layers: int) -> tuple[ResidualLayer, ...] | None:
    """The residual of each of `layers` layers, bottom first; None for a score without one.

    For RealFormer's scores s_n = Σ_m q_m k_mᵀ, m ≤ n, or their mean over the layers, the kernel of
    the lowest layer decides how they are stored (`kernels.residual`).
    """
    spec = as_spec(spec)
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
