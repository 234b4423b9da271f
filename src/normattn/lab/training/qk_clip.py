"""QK-Clip: weights of the heads whose largest logit passed τ in a step are made smaller after it.

    γ_h = min(1, τ / S_h)        W_q^h ← √γ_h · W_q^h        W_k^h ← √γ_h · W_k^h

S_h is the largest logit of head h that the step saw, over all processes. Where query heads share a
key head, that takes the root of their smallest γ, and each query head what is left of its own.
Source: Kimi K2 (arXiv 2507.20534), section 2.1.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from normattn.errors import InputError
from normattn.kernels import AttentionInputs
from normattn.kernels.stats import Observation, Observer, observing
from normattn.lab.training.config import refuse_score
from normattn.lab.training.distributed import World
from normattn.lab.training.sharding import held_rows, replaced, whole
from normattn.layers import Attention, CrossAttention, GatedAttentionUnit
from normattn.score import Score

_LAYERS = (Attention, CrossAttention, GatedAttentionUnit)


class QKClip:
    """Sees the largest logits of a step's forward passes, and shrinks weights after its update.

    `threshold` is τ. Raises `InputError` for a model without attention of ours, and for a score
    whose largest logit is not in proportion to the weights of q and k.
    """

    def __init__(self, model: nn.Module, threshold: float, world: World) -> None:
        layers = [module for module in model.modules() if isinstance(module, _LAYERS)]
        if not layers:
            raise InputError(
                "qk_clip is set, but the model has no attention whose weights it can clip"
            )
        for layer in layers:
            refuse_score(layer.score.spec)
        self._world, self._threshold = world, threshold
        self._layers = {layer.score: layer for layer in layers}
        self._largest: dict[Score, Tensor] = {}
        self._forget()

    def _forget(self) -> None:
        """Largest logits (h,) of −∞: nothing went through a layer yet."""
        for score, layer in self._layers.items():
            device = next(layer.parameters()).device
            self._largest[score] = torch.full((score.heads,), -torch.inf, device=device)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look at the forward passes inside, in addition to other observers."""
        with observing(_Largest(self._largest)):
            yield

    @torch.no_grad()
    def clip(self) -> float:
        """Shrink what passed the threshold; returns the largest logit of the step."""
        logits = [self._largest[score] for score in self._layers]
        every = self._world.largest(torch.cat(logits))
        parts = torch.split(every, [len(x) for x in logits])
        for layer, largest in zip(self._layers.values(), parts, strict=True):
            factor = (self._threshold / largest).clamp(max=1.0)
            # A logit of 0 or less needs nothing; one that is no number is a divergence's to tell.
            factor = torch.where(largest > 0, factor, torch.ones_like(factor))
            if bool((factor < 1).any()):
                with _whole_weights(layer):
                    layer.shrink(factor)
        self._forget()
        return float(every.max())


@contextmanager
def _whole_weights(layer: nn.Module) -> Iterator[None]:
    """The layer with whole weights; afterwards each process keeps those rows that it holds."""
    with replaced(layer, lambda parameter: whole(parameter.detach())) as found:
        yield
    for parameter, changed in found.items():
        rows, first = held_rows(parameter.detach())
        rows.copy_(changed[first : first + len(rows)])


class _Largest(Observer):
    """Raises the largest logit (h,) of each head of the scores in `largest`."""

    def __init__(self, largest: dict[Score, Tensor]) -> None:
        self._largest = largest
        self._owner: Score | None = None
        self._padding: Tensor | None = None
        self._rows = slice(None)

    def enter_layer(self, owner: Any, q: Tensor, k: Tensor, padding: Any, positions: Any) -> None:
        """A layer's calls follow."""
        self._owner = owner if isinstance(owner, Score) and owner in self._largest else None
        self._padding, self._rows = padding[0], slice(None)

    def select_rows(self, rows: slice, members: Tensor | None) -> None:
        """The next call is that of some rows."""
        self._rows = rows

    def record(self, inputs: AttentionInputs, observation: Observation) -> None:
        """Take the largest logits of rows that are no padding."""
        if self._owner is not None:
            largest = observation.largest.detach().float()
            if self._padding is not None:
                largest = largest.masked_fill(self._padding[:, None, self._rows], -torch.inf)
            before = self._largest[self._owner]
            self._largest[self._owner] = torch.maximum(before, largest.amax((0, 2)))
