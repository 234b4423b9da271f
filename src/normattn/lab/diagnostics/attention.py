"""Recompute attention weights by the reference kernel.

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

MAX_TOKENS = 512


@torch.no_grad()
def attention_of(
    inputs: AttentionInputs, rows: Int[Tensor, " r"] | None = None
) -> Float[Tensor, "b h r s"]:
    """Return α_ij = softmax_j s(i, j) for the queries in `rows` (default: all), without dropout.

    A row sums to 1 minus the weight of a learned sink. Residual scores must be summed before
    (`ResidualSum`). `rows` cannot be given for a score with two position regimes (ReRoPE).
    """
    batch, groups, keys = inputs.k.shape[:3]
    # With unit vectors as values, the outputs are the weights.
    identity = torch.eye(keys, dtype=inputs.q.dtype, device=inputs.q.device)
    inputs = replace(inputs, v=identity.expand(batch, groups, keys, keys), dropout=0.0)
    if rows is None:
        return reference(inputs)
    if inputs.selection is not None:
        # A row depends on the selections of all rows before it.
        return strips(inputs)[:, :, rows]
    mask = inputs.mask
    documents = None if mask.query_documents is None else mask.query_documents[:, rows]
    mask = replace(mask, query=mask.query[..., rows], aligned=False, query_documents=documents)
    return reference(replace(inputs, q=inputs.q[:, :, rows], mask=mask))


class ResidualSum:
    """Turns inputs with residual scores into equivalent inputs of one layer.

    Call it for every layer of a forward pass, bottom first. Encoder and decoder are independent.
    """

    def __init__(self) -> None:
        self._layers: WeakKeyDictionary[ResidualScores, list[tuple[Tensor, Tensor]]] = (
            WeakKeyDictionary()
        )

    def add(self, inputs: AttentionInputs) -> AttentionInputs:
        """Return inputs whose product q·k is the sum of the scores of all layers so far."""
        residual = inputs.residual_scores
        if residual is None:
            return inputs
        layers = self._layers.setdefault(residual, [])
        layers.append((inputs.q, inputs.k))
        q, k = (torch.cat(features, -1) for features in zip(*layers, strict=True))
        return replace(inputs, q=q / len(layers) if residual.mean else q, k=k, residual_scores=None)


def attention_weights(
    model: nn.Module,
    text: Shaped[Tensor, "*t"],
    read: Callable[[Tensor], Any] | None = None,
    length: int | None = None,
    names: Mapping[Any, Sequence[str]] | None = None,
) -> dict[str, Float[Tensor, "h t s"]]:
    """Return the attention weights of every layer for one text of at most 512 tokens, by name.

    `read` and `length` are as in `inspect_model`. `names` are the layers of each owner, by default
    of the model's scores. The active method and residual scores are included. A row sums to 1
    minus the weight of a learned sink. Raises `InputError` for an empty or a longer text.
    """
    tokens = text.shape[0] if length is None else length
    if not 0 < tokens <= MAX_TOKENS:
        raise InputError(f"attention is shown for 1 to {MAX_TOKENS} tokens, not for {tokens}")
    recorder = _WeightRecorder(layer_names(model) if names is None else names)
    reader: Callable[[Tensor], Any] = getattr(model, "hidden", model) if read is None else read
    with torch.no_grad(), without_dropout(model), observing(recorder):
        reader(text[None])
    by_layer = {}
    for name, chunks in recorder.chunks.items():
        # Rows that were computed with fewer keys have weight 0 on the others.
        keys = max(chunk.shape[2] for chunk in chunks)
        padded = [nn.functional.pad(chunk, (0, keys - chunk.shape[2])) for chunk in chunks]
        by_layer[name] = torch.cat(padded, 1)
    return by_layer


class _WeightRecorder(Observer):
    """Stores the weights of every layer in chunks (H, rows, S)."""

    def __init__(self, names: Mapping[Any, Sequence[str]]) -> None:
        self.chunks: dict[str, list[Tensor]] = {}
        self._layers = {owner: itertools.cycle(layers) for owner, layers in names.items()}
        self._name = ""
        self._residual = ResidualSum()

    def enter_layer(self, owner: Any, q: Tensor, k: Tensor, padding: Any, positions: Any) -> None:
        self._name = next(self._layers[owner])
        self.chunks[self._name] = []

    def record(self, inputs: AttentionInputs, observation: Observation) -> None:
        weights = attention_of(self._residual.add(inputs))[0]
        self.chunks[self._name].append(weights.float().cpu())
