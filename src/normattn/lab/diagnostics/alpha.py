"""The attention weights α of some query rows, by the kernels' own definition.

Legend: B batch, H query heads, R chosen queries, S keys.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor

from normattn.kernels import AttentionInputs
from normattn.kernels.inputs import CarriedSum
from normattn.kernels.reference import reference, strips


@torch.no_grad()
def alpha(
    problem: AttentionInputs, rows: Int[Tensor, " r"] | None = None
) -> Float[Tensor, "b h r s"]:
    """α_ij = softmax_j s(i, j) of the queries in `rows`, or of all, without dropout.

    A learned sink's share is what a row lacks to 1. The problem must not be one of scores that are
    carried (`Summed`), and for `rows` not one of two regimes.
    """
    batch, groups, keys = problem.k.shape[:3]
    # Values that are the unit vectors turn outputs into weights.
    unit = torch.eye(keys, dtype=problem.q.dtype, device=problem.q.device)
    whole = replace(problem, v=unit.expand(batch, groups, keys, keys), dropout=0.0)
    if rows is None:
        return reference(whole)
    if problem.selection is not None:
        # A row reads what all those before it have selected.
        return strips(whole)[:, :, rows]
    seen = problem.visibility
    own = None if seen.query_documents is None else seen.query_documents[:, rows]
    seen = replace(seen, query=seen.query[..., rows], aligned=False, query_documents=own)
    return reference(replace(whole, q=problem.q[:, :, rows], visibility=seen))


class Watcher:
    """An observer that whole texts pass in order, and that asks for no functions of distance."""

    def enter(self, owner: Any, q: Tensor, k: Tensor, padding: Any, at: Any) -> None:
        """A layer begins."""

    def confine(self, rows: slice, own: Tensor | None) -> None:
        """The next problem is that of some rows."""

    def functions(self, problem: AttentionInputs) -> Tensor | None:
        """None are wanted."""
        return None


class Summed:
    """Problems whose scores are carried from layer to layer, as ones that stand alone.

    It must be shown every layer of a forward pass, bottom first; each carry (an encoder's, a
    decoder's two) is summed by itself.
    """

    def __init__(self) -> None:
        self._features: WeakKeyDictionary[CarriedSum, list[tuple[Tensor, Tensor]]] = (
            WeakKeyDictionary()
        )

    def alone(self, problem: AttentionInputs) -> AttentionInputs:
        """The same scores as one product: of the features of all layers so far."""
        carry = problem.carry
        if carry is None:
            return problem
        layers = self._features.setdefault(carry, [])
        layers.append((problem.q, problem.k))
        q, k = (torch.cat(parts, -1) for parts in zip(*layers, strict=True))
        return replace(problem, q=q / len(layers) if carry.mean else q, k=k, carry=None)
