"""What changes from layer to layer of an encoder: variance, attention, gradients.

Legend: B batch, H heads, R sampled queries, S keys, D documents, N layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from normattn.kernels import AttentionInputs
from normattn.kernels.stats import Observation, observing
from normattn.lab.data.windows import MaskedSet
from normattn.lab.diagnostics.alpha import Summed, Watcher, alpha
from normattn.models.masked_lm import MaskedLM
from normattn.models.utils import without_dropout

Array = NDArray[np.float64]
SAMPLED = 16
"""Queries of a text whose attention is compared between layers."""


@dataclass(frozen=True)
class DepthSums:
    """Sums over the texts of each document, in the order of `document_of`'s numbers.

    `variance` (D, N + 1): the variance of the residual stream over its features, mean over tokens;
    first what the first layer reads, then each layer's output. `entropy` (D, N): of attention, in
    nats, mean over heads and queries. `agreement` (D, N − 1): between the attention of a layer and
    of the one below it, Σ_j min(α_ij, α′_ij) = 1 − ½ Σ_j |α_ij − α′_ij|, mean over `SAMPLED`
    queries spread evenly over the text and over heads, head h compared with head h;
    `agreement_mean`: the same of the attention that is the mean over heads, for which their order
    does not matter.
    """

    variance: Array
    entropy: Array
    agreement: Array
    agreement_mean: Array


def measure_depth(
    model: MaskedLM,
    texts: MaskedSet,
    document_of: NDArray[np.int64],
    tokens_per_batch: int = 4096,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> DepthSums:
    """Read `texts`, text w of document `document_of[w]`; dropout is off meanwhile.

    Entropy comes from the kernels at work (`kernels.stats`), without any T × S matrix; attention
    is computed again for the sampled queries only. `tokens_per_batch` bounds memory.
    """
    layers, count = model.config.layers, int(document_of.max()) + 1
    device = next(model.parameters()).device
    sums = {"variance": np.zeros((count, layers + 1)), "entropy": np.zeros((count, layers))}
    sums |= {name: np.zeros((count, layers - 1)) for name in ("agreement", "agreement_mean")}
    step = max(1, tokens_per_batch // texts.length)
    for first in range(0, len(texts), step):
        rows = slice(first, first + step)
        eyes = _Eyes()
        variance: list[Tensor] = []

        def after(layer: int, x: Tensor, variances: list[Tensor] = variance) -> None:
            variances.append(x.double().var(-1, correction=0).mean(-1))

        with torch.no_grad(), without_dropout(model), observing(eyes):
            model.hidden(torch.from_numpy(texts.rows.ids[rows]).to(device), after=after)
        measured = {"variance": variance, "entropy": eyes.entropy}
        measured |= {"agreement": eyes.agreement, "agreement_mean": eyes.agreement_mean}
        for name, values in measured.items():
            if values:
                np.add.at(sums[name], document_of[rows], torch.stack(values, -1).cpu().numpy())
        progress(min(first + step, len(texts)), len(texts))
    return DepthSums(**sums)


def layer_gradients(
    model: MaskedLM, texts: MaskedSet, tokens_per_batch: int = 4096
) -> list[list[float]]:
    """‖∂ loss / ∂ θ_l‖ of each layer l, for each batch of texts; dropout is off meanwhile.

    Empty where layers share their weights, which have one gradient. The gradients that the model
    had are gone afterwards.
    """
    if model.config.shared_layers:
        return []
    device = next(model.parameters()).device
    step = max(1, tokens_per_batch // texts.length)
    gradients = []
    for first in range(0, len(texts), step):
        rows = slice(first, first + step)
        model.zero_grad(set_to_none=True)
        batch = (torch.from_numpy(array[rows]).to(device) for array in texts.rows)
        with without_dropout(model):
            torch.autograd.backward(model.loss(*batch).loss)
        norms = [
            torch.nn.utils.get_total_norm(
                [p.grad for p in block.parameters() if p.grad is not None]
            )
            for block in model.blocks
        ]
        gradients.append([float(norm) for norm in norms])
    model.zero_grad(set_to_none=True)
    return gradients


class _Eyes(Watcher):
    """Sees the problem of each layer of one forward: entropy of all queries, agreement of some."""

    def __init__(self) -> None:
        self.entropy: list[Tensor] = []
        self.agreement: list[Tensor] = []
        self.agreement_mean: list[Tensor] = []
        self._summed = Summed()
        self._below: Tensor | None = None

    def see(self, problem: AttentionInputs, observation: Observation) -> None:
        """A layer's attention is done."""
        self.entropy.append(observation.entropy.double().mean((1, 2)))
        attention = self._sampled(problem)
        if self._below is not None:
            self.agreement.append(_shared(attention, self._below).mean((1, 2)))
            means = attention.mean(1), self._below.mean(1)
            self.agreement_mean.append(_shared(*means).mean(1))
        self._below = attention

    def _sampled(self, problem: AttentionInputs) -> Float[Tensor, "b h r s"]:
        """The attention weights of some queries, with what the layers below carry."""
        queries, device = problem.q.shape[2], problem.q.device
        rows = torch.linspace(0, queries - 1, min(SAMPLED, queries)).long().to(device)
        return alpha(self._summed.alone(problem), rows).double()


def _shared(a: Tensor, b: Tensor) -> Tensor:
    """Σ_j min(a_j, b_j)."""
    return torch.minimum(a, b).sum(-1)
