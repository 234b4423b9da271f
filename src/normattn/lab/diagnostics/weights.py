"""The attention weights of every layer for one short text: the only place with whole matrices.

Legend: B batch, H query heads, T queries, S keys.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from normattn.errors import InputError
from normattn.kernels import AttentionInputs
from normattn.kernels.stats import Observation, observing
from normattn.lab.diagnostics.alpha import Summed, Watcher, alpha
from normattn.lab.diagnostics.collecting import layer_names
from normattn.models.utils import without_dropout

MOST_TOKENS = 512


def attention_weights(
    model: nn.Module,
    text: Shaped[Tensor, "*t"],
    read: Callable[[Tensor], Any] | None = None,
    length: int | None = None,
    names: Mapping[Any, Sequence[str]] | None = None,
) -> dict[str, Float[Tensor, "h t s"]]:
    """α of every layer for one text of at most 512 tokens, by the name of the layer.

    `read` and `length` as for `inspect_model`: anything else that the model reads. `names` are
    those of the layers of whoever is announced, by default of the model's scores.

    By the kernels' own definition, with what layers carry and whatever method is on; a learned
    sink's share is what a row lacks to 1. Raises `InputError` for a longer text: matrices are for
    looking at, and everything else is streamed (`inspect_model`).
    """
    tokens = text.shape[0] if length is None else length
    if not 0 < tokens <= MOST_TOKENS:
        raise InputError(
            f"attention is drawn for 1 to {MOST_TOKENS} tokens, but the text has {tokens}"
        )
    names = layer_names(model) if names is None else names
    if not names:
        raise InputError("this model holds no Score to look at")
    keep = _Keep(names)
    reader: Callable[[Tensor], Any] = getattr(model, "hidden", model) if read is None else read
    with torch.no_grad(), without_dropout(model), observing(keep):
        reader(text[None])
    return keep.whole()


class _Keep(Watcher):
    """Keeps the weights of every layer, as rows that belong together."""

    def __init__(self, names: Mapping[Any, Sequence[str]]) -> None:
        self._turns: dict[object, Iterator[str]] = {
            owner: itertools.cycle(layers) for owner, layers in names.items()
        }
        self.parts: dict[str, list[Tensor]] = {}
        self._name = ""
        self._summed = Summed()

    def enter(self, owner: Any, q: Tensor, k: Tensor, padding: Any, at: Any) -> None:
        """A layer begins."""
        self._name = next(self._turns[owner])
        self.parts[self._name] = []

    def see(self, problem: AttentionInputs, observation: Observation) -> None:
        """Compute a layer's weights once more."""
        weights = alpha(self._summed.alone(problem))[0]
        self.parts[self._name].append(weights.float().cpu())

    def whole(self) -> dict[str, Tensor]:
        """(H, T, S) of every layer; rows that were computed with fewer keys see no others."""
        by_layer = {}
        for name, parts in self.parts.items():
            keys = max(part.shape[2] for part in parts)
            wide = [nn.functional.pad(part, (0, keys - part.shape[2])) for part in parts]
            by_layer[name] = torch.cat(wide, 1)
        return by_layer
