"""The output gate of attention: each head's output times a gate of the layer's input.

Legend: B batch, H query heads, T queries, E value size.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from normattn.errors import InputError
from normattn.score import ScoreSpec


def gate_projection(spec: ScoreSpec, dim: int, heads: int, size: int) -> nn.Linear | None:
    """W_g of a score with `Gate`: from the layer's width to H or H·E; None for other scores."""
    if spec.gate is None:
        return None
    return nn.Linear(dim, heads * (size if spec.gate.per == "feature" else 1), bias=False)


def gated(
    spec: ScoreSpec, o: Float[Tensor, "b h t e"], gate: Float[Tensor, "b t gates"] | None
) -> Float[Tensor, "b h t e"]:
    """act(gate) ⊙ o, gate (B, T, H) or (B, T, H·E) as the score says; o itself without `Gate`."""
    if spec.gate is None or gate is None:
        return o
    logits = gate.reshape(*gate.shape[:2], o.shape[1], -1).transpose(1, 2)
    return o * (torch.sigmoid(logits) if spec.gate.act == "sigmoid" else F.softplus(logits))


def check_gate(spec: ScoreSpec, gate: Tensor | None, q: Tensor, v: Tensor) -> None:
    """Refuse a gate that the score does not have, one that is missing, and other shapes."""
    if spec.gate is None:
        if gate is not None:
            raise InputError(f"a gate is given, but {spec.name} has none: name {spec.name}-Gate")
        return
    heads, size = q.shape[1], v.shape[-1]
    wide = heads * (size if spec.gate.per == "feature" else 1)
    expected = (q.shape[0], q.shape[2], wide)
    if gate is None:
        raise InputError(
            f"{spec.name} gates its output and needs gate=…, W_g x of shape {expected}"
        )
    if tuple(gate.shape) != expected or not gate.is_floating_point():
        raise InputError(
            f"gate must be floating of shape {expected} for {spec.name}, but it is {gate.dtype} of "
            f"{tuple(gate.shape)}"
        )
