"""QK-Clip: after a step, shrink the weights of heads whose largest logit exceeded τ.

    γ_h = min(1, τ / S_h)        W_q^h ← √γ_h · W_q^h        W_k^h ← √γ_h · W_k^h

S_h is the largest logit of head h in the step, over all processes. Query heads that share a key
head shrink it by the root of their smallest γ, and each query head by the remainder of its own γ.
Source: Kimi K2 (arXiv 2507.20534), section 2.1.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from normattn.errors import InputError
from normattn.kernels import AttentionInputs
from normattn.kernels.stats import Observation, Observer, observing
from normattn.lab.training.config import check_qk_clip
from normattn.lab.training.distributed import World
from normattn.lab.training.sharding import full_tensor, local_rows, replace_sharded_parameters
from normattn.layers import Attention, CrossAttention, GatedAttentionUnit
from normattn.score import Score

_LAYERS = (Attention, CrossAttention, GatedAttentionUnit)


class QKClip(Observer):
    """Records the largest logits of a step's forward passes, and shrinks weights after its update.

    `threshold` is τ. Raises `InputError` for a model without normattn's attention, and for a score
    whose logits are not proportional to the weights of q and k.
    """

    def __init__(self, model: nn.Module, threshold: float, world: World) -> None:
        layers = [module for module in model.modules() if isinstance(module, _LAYERS)]
        if not layers:
            raise InputError(
                "qk_clip is set, but the model has no attention whose weights it can clip"
            )
        for layer in layers:
            check_qk_clip(layer.score.spec)
        self._world, self._threshold = world, threshold
        self._layers = {layer.score: layer for layer in layers}
        self._largest: dict[Score, Tensor] = {}
        self._reset()
        # The layer that runs now, its query padding and its rows.
        self._owner: Score | None = None
        self._padding: Tensor | None = None
        self._rows = slice(None)

    def _reset(self) -> None:
        """Set the largest logits (h,) to −∞."""
        for score, layer in self._layers.items():
            device = next(layer.parameters()).device
            self._largest[score] = torch.full((score.heads,), -torch.inf, device=device)

    def recording(self) -> AbstractContextManager[None]:
        """Record the largest logits of forward passes inside, in addition to other observers."""
        return observing(self)

    def enter_layer(self, owner: Any, q: Tensor, k: Tensor, padding: Any, positions: Any) -> None:
        """Start a layer, which counts if it belongs to the model."""
        self._owner = owner if isinstance(owner, Score) and owner in self._largest else None
        self._padding, self._rows = padding[0], slice(None)

    def select_rows(self, rows: slice, members: Tensor | None) -> None:
        """Note the rows of the next call."""
        self._rows = rows

    def record(self, inputs: AttentionInputs, observation: Observation) -> None:
        """Update the largest logit (h,) of each head of the layer."""
        if self._owner is not None:
            largest = observation.largest.detach().float()
            if self._padding is not None:
                largest = largest.masked_fill(self._padding[:, None, self._rows], -torch.inf)
            before = self._largest[self._owner]
            self._largest[self._owner] = torch.maximum(before, largest.amax((0, 2)))

    @torch.no_grad()
    def clip(self) -> float:
        """Shrink the weights of heads above the threshold; return the largest logit of the step."""
        logits = [self._largest[score] for score in self._layers]
        largest = self._world.max(torch.cat(logits))
        by_layer = torch.split(largest, [len(x) for x in logits])
        for layer, largest_of_heads in zip(self._layers.values(), by_layer, strict=True):
            factor = (self._threshold / largest_of_heads).clamp(max=1.0)
            # Logits of 0 or less need nothing; NaN is reported as a divergence.
            factor = torch.where(largest_of_heads > 0, factor, torch.ones_like(factor))
            if bool((factor < 1).any()):
                full = replace_sharded_parameters(layer, lambda p: full_tensor(p.detach()))
                with full as replacements:
                    layer.shrink(factor)
                for parameter, changed in replacements.items():
                    rows, first = local_rows(parameter.detach())
                    rows.copy_(changed[first : first + len(rows)])
        self._reset()
        return float(largest.max())
