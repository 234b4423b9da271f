"""QK-Clip: weights of the heads whose largest logit passed τ in a step are made smaller after it.

    γ_h = min(1, τ / S_h)        W_q^h ← √γ_h · W_q^h        W_k^h ← √γ_h · W_k^h

S_h is the largest logit of head h that the step saw, over all processes. Where query heads share a
key head, that takes the root of their smallest γ, and each query head what is left of its own.
Source: Kimi K2 (arXiv 2507.20534), section 2.1.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from normattn.errors import InputError
from normattn.kernels import AttentionInputs
from normattn.kernels.stats import Observation, Observer, observer, observing
from normattn.lab.training.config import refuse_score
from normattn.lab.training.distributed import World
from normattn.layers import Attention, CrossAttention, GatedAttentionUnit
from normattn.score import Score

Layer = Attention | CrossAttention | GatedAttentionUnit
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
                "qk_clip is set, but the model has no attention whose weights it knows"
            )
        for layer in layers:
            refuse_score(layer.score.spec)
        self._world, self._threshold = world, threshold
        self._layers = {layer.score: layer for layer in layers}
        self._seen = _Largest(self._layers.keys())

    def watching(self) -> AbstractContextManager[None]:
        """Look at the forward passes inside, beside whoever observes them already."""
        self._seen.beside = observer()
        return observing(self._seen)

    @torch.no_grad()
    def clip(self) -> float:
        """Shrink what passed the threshold; returns the largest logit of the step."""
        logits = [self._seen.of(score, layer) for score, layer in self._layers.items()]
        self._seen.forget()
        every = self._world.largest(torch.cat(logits))
        parts = torch.split(every, [len(x) for x in logits])
        for layer, largest in zip(self._layers.values(), parts, strict=True):
            factor = (self._threshold / largest).clamp(max=1.0)
            # A logit of 0 or less needs nothing; one that is no number is a divergence's to tell.
            factor = torch.where(largest > 0, factor, torch.ones_like(factor))
            if bool((factor < 1).any()):
                layer.shrink(factor)
        return float(every.max())


class _Largest:
    """The largest logit of each head of the layers whose scores are `owners`.

    Everything is also told to the observer `beside` it, where there is one.
    """

    def __init__(self, owners: Collection[Score]) -> None:
        self.beside: Observer | None = None
        self._owners = owners
        self._owner: Score | None = None
        self._padding: Tensor | None = None
        self._rows: slice = slice(None)
        self._largest: dict[Score, Tensor] = {}

    def of(self, score: Score, layer: Layer) -> Float[Tensor, " h"]:
        """−∞ for a layer that nothing went through."""
        device = next(layer.parameters()).device
        return self._largest.get(score, torch.full((score.heads,), -torch.inf, device=device))

    def forget(self) -> None:
        """Before the next step."""
        self._largest.clear()

    def enter(
        self,
        owner: object,
        q: Float[Tensor, "b h t d"],
        k: Float[Tensor, "b g s d"],
        padding: tuple[Bool[Tensor, "b t"] | None, Bool[Tensor, "b s"] | None],
        at: tuple[Int[Tensor, "*bq t"], Int[Tensor, "*bk s"]],
    ) -> None:
        """A layer's problems follow."""
        self._owner = owner if isinstance(owner, Score) and owner in self._owners else None
        self._padding, self._rows = padding[0], slice(None)
        if self.beside is not None:
            self.beside.enter(owner, q, k, padding, at)

    def confine(self, rows: slice, own: Bool[Tensor, "*b t"] | None) -> None:
        """The next problem is that of some rows."""
        self._rows = rows
        if self.beside is not None:
            self.beside.confine(rows, own)

    def functions(self, problem: AttentionInputs) -> Float[Tensor, "f r"] | None:
        """Nothing more is asked of the weights than by the observer beside it."""
        return None if self.beside is None else self.beside.functions(problem)

    def see(self, problem: AttentionInputs, observation: Observation) -> None:
        """Take the largest logits of rows that are no padding."""
        if self.beside is not None:
            self.beside.see(problem, observation)
        if self._owner is None:
            return
        largest = observation.largest.detach().float()
        if self._padding is not None:
            largest = largest.masked_fill(self._padding[:, None, self._rows], -torch.inf)
        logits = largest.amax((0, 2))
        before = self._largest.get(self._owner)
        self._largest[self._owner] = logits if before is None else torch.maximum(before, logits)
