"""Changes from layer to layer of an encoder: variance, attention, gradients.

Legend: B batch, H heads, R sampled queries, S keys, D documents, N layers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from normattn.kernels import AttentionInputs
from normattn.kernels.stats import Observation, Observer, observing
from normattn.lab.data.windows import MaskedSet
from normattn.lab.diagnostics.attention import ResidualSum, attention_of
from normattn.models.masked_lm import MaskedLM
from normattn.models.utils import without_dropout

Array = NDArray[np.float64]
SAMPLED = 16
"""The number of queries per text at which layers are compared."""


def measure_depth(
    model: MaskedLM,
    texts: MaskedSet,
    document_of: NDArray[np.int64],
    tokens_per_batch: int = 4096,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Array]:
    """Return sums over the texts of each document; text w is of document `document_of[w]`.

    - `variance` (D, N + 1): variance of the residual stream over features, mean over tokens, before
      the first layer and after each.
    - `entropy` (D, N): of attention, in nats, mean over heads and queries.
    - `agreement` (D, N − 1): Σ_j min(α_ij, α′_ij) = 1 − ½ Σ_j |α_ij − α′_ij| between the attention
      of a layer and the one below, head by head, mean over heads and `SAMPLED` queries.
    - `agreement_mean`: the same for attention averaged over heads, which ignores their order.

    Dropout is off. Entropy is a kernel statistic, without a T × S matrix. Attention is recomputed
    for the sampled queries only. `tokens_per_batch` bounds memory.
    """
    layers, count = model.config.layers, int(document_of.max()) + 1
    device = next(model.parameters()).device
    widths = {"variance": layers + 1, "entropy": layers}
    widths |= dict.fromkeys(("agreement", "agreement_mean"), layers - 1)
    sums = {name: np.zeros((count, width)) for name, width in widths.items()}
    step = max(1, tokens_per_batch // texts.length)
    for first in range(0, len(texts), step):
        rows = slice(first, first + step)
        statistics = _TextStatistics()
        with torch.no_grad(), without_dropout(model), observing(statistics):
            ids = torch.from_numpy(texts.rows.ids[rows]).to(device)
            model.hidden(ids, after=statistics.add_variance)
        for name, values in statistics.by_layer.items():
            np.add.at(sums[name], document_of[rows], torch.stack(values, -1).cpu().numpy())
        progress(min(rows.stop, len(texts)), len(texts))
    return sums


def layer_gradients(model: MaskedLM, texts: MaskedSet, rows: int) -> list[list[float]]:
    """Return ‖∂ loss / ∂ θ_l‖ of each layer for each `rows` texts; [] if layers share weights.

    Deletes the model's gradients.
    """
    if model.config.shared_layers:
        return []
    device = next(model.parameters()).device
    gradients = []
    for first in range(0, len(texts), rows):
        model.zero_grad(set_to_none=True)
        chosen = (array[first : first + rows] for array in texts.rows)
        batch = (torch.from_numpy(array).to(device) for array in chosen)
        with without_dropout(model):
            torch.autograd.backward(model.loss(*batch).loss)
        by_block = ([p.grad for p in b.parameters() if p.grad is not None] for b in model.blocks)
        gradients.append([float(torch.nn.utils.get_total_norm(block)) for block in by_block])
    model.zero_grad(set_to_none=True)
    return gradients


class _TextStatistics(Observer):
    """Statistics of each text (B,) in one forward pass, a list by layer for each name."""

    def __init__(self) -> None:
        self.by_layer: dict[str, list[Tensor]] = defaultdict(list)
        self._residual = ResidualSum()
        self._below: Tensor | None = None

    def add_variance(self, layer: int, x: Tensor) -> None:
        self.by_layer["variance"].append(x.double().var(-1, correction=0).mean(-1))

    def record(self, inputs: AttentionInputs, observation: Observation) -> None:
        """Add the entropy of a layer's queries, and the agreement of sampled ones."""
        self.by_layer["entropy"].append(observation.entropy.double().mean((1, 2)))
        queries, device = inputs.q.shape[2], inputs.q.device
        rows = torch.linspace(0, queries - 1, min(SAMPLED, queries)).long().to(device)
        attention = attention_of(self._residual.add(inputs), rows).double()
        if (below := self._below) is not None:
            overlap = torch.minimum(attention, below).sum(-1)
            self.by_layer["agreement"].append(overlap.mean((1, 2)))
            overlap = torch.minimum(attention.mean(1), below.mean(1)).sum(-1)
            self.by_layer["agreement_mean"].append(overlap.mean(1))
        self._below = attention
