"""Attention weights computed once more, by the kernels' own definition.

Legend: B batch, H query heads, R chosen queries, T queries, S keys.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from normattn.errors import InputError
from normattn.kernels import AttentionInputs
from normattn.kernels.reference import reference, strips
from normattn.kernels.residual_scores import ResidualScores
from normattn.kernels.stats import Observation, Observer, observing
from normattn.lab.diagnostics.collector import layer_names
from normattn.models.utils import without_dropout

MOST_TOKENS = 512


@torch.no_grad()
def attention_of(
    inputs: AttentionInputs, rows: Int[Tensor, " r"] | None = None
) -> Float[Tensor, "b h r s"]:
    """α_ij = softmax_j s(i, j) of the queries in `rows`, or of all, without dropout.

    A learned sink's share is what a row lacks to 1. Residual scores must be summed before
    (`ResidualSum`), and `rows` may not be asked of two position regimes.
    """
    batch, groups, keys = inputs.k.shape[:3]
    # Values that are the unit vectors turn outputs into weights.
    unit = torch.eye(keys, dtype=inputs.q.dtype, device=inputs.q.device)
    whole = replace(inputs, v=unit.expand(batch, groups, keys, keys), dropout=0.0)
    if rows is None:
        return reference(whole)
    if inputs.selection is not None:
        # A row reads what all those before it have selected.
        return strips(whole)[:, :, rows]
    mask = inputs.mask
    documents = None if mask.query_documents is None else mask.query_documents[:, rows]
    mask = replace(mask, query=mask.query[..., rows], aligned=False, query_documents=documents)
    return reference(replace(whole, q=inputs.q[:, :, rows], mask=mask))


class ResidualSum:
    """Make inputs with residual scores into inputs that do not depend on other layers.

    It must be shown every layer of a forward pass, bottom first; an encoder's and a decoder's
    residual scores are summed apart.
    """

    def __init__(self) -> None:
        self._layers: WeakKeyDictionary[ResidualScores, list[tuple[Tensor, Tensor]]] = (
            WeakKeyDictionary()
        )

    def alone(self, inputs: AttentionInputs) -> AttentionInputs:
        """The same scores as one product: of the features of all layers so far."""
        residual = inputs.residual_scores
        if residual is None:
            return inputs
        layers = self._layers.setdefault(residual, [])
        layers.append((inputs.q, inputs.k))
        q, k = (torch.cat(parts, -1) for parts in zip(*layers, strict=True))
        return replace(inputs, q=q / len(layers) if residual.mean else q, k=k, residual_scores=None)


def attention_weights(
    model: nn.Module,
    text: Shaped[Tensor, "*t"],
    read: Callable[[Tensor], Any] | None = None,
    length: int | None = None,
    names: Mapping[Any, Sequence[str]] | None = None,
) -> dict[str, Float[Tensor, "h t s"]]:
    """α of every layer for one text of at most 512 tokens, by the name of the layer.

    `read` and `length` as for `inspect_model`. `names` are those of the layers of each owner, by
    default of the model's scores. Residual scores and the method that is on are included; a
    learned sink's share is what a row lacks to 1. Raises `InputError` for a longer text: matrices
    are for looking at, everything else is streamed.
    """
    tokens = text.shape[0] if length is None else length
    if not 0 < tokens <= MOST_TOKENS:
        raise InputError(
            f"attention can be shown for 1 to {MOST_TOKENS} tokens, but the text has {tokens}"
        )
    keep = _Keep(layer_names(model) if names is None else names)
    reader: Callable[[Tensor], Any] = getattr(model, "hidden", model) if read is None else read
    with torch.no_grad(), without_dropout(model), observing(keep):
        reader(text[None])
    by_layer = {}
    for name, parts in keep.parts.items():
        # Rows that were computed with fewer keys see no others.
        keys = max(part.shape[2] for part in parts)
        wide = [nn.functional.pad(part, (0, keys - part.shape[2])) for part in parts]
        by_layer[name] = torch.cat(wide, 1)
    return by_layer


class _Keep(Observer):
    """Keeps the weights of every layer, in parts (H, rows, S)."""

    def __init__(self, names: Mapping[Any, Sequence[str]]) -> None:
        self.parts: dict[str, list[Tensor]] = {}
        self._turns = {owner: itertools.cycle(layers) for owner, layers in names.items()}
        self._name = ""
        self._residual = ResidualSum()

    def enter_layer(self, owner: Any, q: Tensor, k: Tensor, padding: Any, positions: Any) -> None:
        """A layer begins."""
        self._name = next(self._turns[owner])
        self.parts[self._name] = []

    def record(self, inputs: AttentionInputs, observation: Observation) -> None:
        """Compute a layer's weights once more."""
        weights = attention_of(self._residual.alone(inputs))[0]
        self.parts[self._name].append(weights.float().cpu())
