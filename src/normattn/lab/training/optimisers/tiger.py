"""Tiger: the sign of one momentum, with a step in proportion to each parameter's own size.

    m ← β·m + (1 − β)·g
    θ ← θ − η_θ·(sign m + wd·θ)

η_θ = η·RMS(θ) for a matrix, η·RMS(row) for each row of an embedding, η/2 and no decay for gains and
biases. One state tensor per parameter. A matrix that is all zero has RMS 0 and never moves, so
nothing trained with Tiger may start from zero but gains and biases. Source: kexue 9512.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from normattn.errors import InputError
from normattn.lab.training.optimisers.groups import ParameterGroups
from normattn.lab.training.optimisers.stepping import Stepping

Kind = Literal["matrix", "embedding", "vector"]


class Tiger(Stepping):
    """Tiger over grouped parameters; see the equation above.

    `lr` > 0 (relative to the size of a parameter), `beta` in [0, 1), `weight_decay` ≥ 0.
    Raises `InputError` for a value outside these ranges, or when a matrix is all zero.
    """

    def __init__(
        self,
        groups: ParameterGroups,
        lr: float = 1e-3,
        beta: float = 0.965,
        weight_decay: float = 0.01,
    ) -> None:
        if not lr > 0.0 or not 0.0 <= beta < 1.0 or weight_decay < 0.0:
            raise InputError(
                f"Tiger needs lr > 0, 0 ≤ beta < 1 and weight_decay ≥ 0; got lr={lr}, "
                f"beta={beta}, weight_decay={weight_decay}"
            )
        for name, parameter in groups.matrices.items():
            if not parameter.any():
                raise InputError(f"Tiger cannot train {name}: it is all zero, and so is its step")
        kinds: list[tuple[Kind, dict[str, nn.Parameter], float]] = [
            ("matrix", groups.matrices, weight_decay),
            ("embedding", groups.embeddings, weight_decay),
            ("vector", groups.vectors, 0.0),
        ]
        super().__init__(
            [
                {"params": list(members.values()), "kind": kind, "weight_decay": decay}
                for kind, members, decay in kinds
                if members
            ],
            {"lr": lr, "beta": beta, "weight_decay": weight_decay, "kind": "matrix"},
        )

    def update(self) -> None:
        """Every parameter that has a gradient."""
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if parameters:
                self._update(parameters, group)

    def _update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        momenta = [self._momentum(p) for p in parameters]
        gradients = [p.grad for p in parameters if p.grad is not None]
        torch._foreach_lerp_(momenta, gradients, 1.0 - group["beta"])
        updates = torch._foreach_sign(momenta)
        if group["weight_decay"] != 0.0:
            torch._foreach_add_(updates, parameters, alpha=group["weight_decay"])
        if group["kind"] == "vector":
            torch._foreach_add_(parameters, updates, alpha=-group["lr"] / 2.0)
            return
        torch._foreach_mul_(updates, _sizes(parameters, group["kind"]))
        torch._foreach_add_(parameters, updates, alpha=-group["lr"])

    def _momentum(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        momentum: Tensor = state["momentum"]
        return momentum


def _sizes(parameters: list[Tensor], kind: Kind) -> list[Tensor]:
    """RMS of each whole matrix, () each, or of each row of an embedding, (rows, 1) each."""
    if kind == "embedding":
        return [p.square().mean(dim=-1, keepdim=True).sqrt_() for p in parameters]
    norms = list(torch._foreach_norm(parameters))
    torch._foreach_div_(norms, [math.sqrt(p.numel()) for p in parameters])
    return norms
