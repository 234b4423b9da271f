"""Token scorers: the loss and correctness of every next token, for all protocols."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor, nn

from normattn.kernels.cross_entropy import TokenScores
from normattn.lab.data.retrieval import RetrievalSet
from normattn.lab.data.windows import EvaluationSet
from normattn.lab.stats import Identity
from normattn.lab.stats.measurements import Factor
from normattn.models.causal_lm import CausalLM

TokenScorer = Callable[[Tensor], TokenScores]
"""Maps ids (b, T + 1) to the loss (b, T) in nats and the correctness (b, T) of tokens 1 … T."""

AnySet = EvaluationSet | RetrievalSet
Precision = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True)
class ModelScorer:
    """Scores with a `CausalLM`, without storing logits of tokens × vocabulary.

    Dropout and gradients are off while scoring; every submodule's mode is restored. `precision`
    "bf16" or "fp16" scores under autocast.
    """

    model: CausalLM
    precision: Precision = "fp32"

    def __call__(self, ids: Int[Tensor, "b t1"], first: int = 0) -> TokenScores:
        """Return the scores of the tokens ids[:, first + 1:]."""
        device = next(self.model.parameters()).device
        with torch.no_grad(), autocast(device, self.precision):
            return self.model.token_scores(ids.to(device), first)


@dataclass(frozen=True)
class CachedScorer:
    """Caches the scores of windows, because several protocols share them.

    The longest natural text, the last segment with the longest context, and the text by position
    may have the same windows. The cache takes 5 bytes a token. The model must not change.
    """

    scorer: TokenScorer
    _cache: dict[bytes, tuple[int, TokenScores]] = field(default_factory=dict)

    def __call__(self, ids: Int[Tensor, "b t1"], first: int = 0) -> TokenScores:
        """Return the scores of the tokens ids[:, first + 1:]."""
        key = hashlib.sha256(repr(tuple(ids.shape)).encode() + ids.numpy().tobytes()).digest()
        if key not in self._cache or self._cache[key][0] > first:
            # A model scores only the tokens that are needed.
            start = first if isinstance(self.scorer, ModelScorer) else 0
            self._cache[key] = start, scores_from(self.scorer, ids, start)
        start, scores = self._cache[key]
        return TokenScores(scores.loss[:, first - start :], scores.correct[:, first - start :])


def scores_from(scorer: TokenScorer, ids: Int[Tensor, "b t1"], first: int) -> TokenScores:
    """Return the scores of the tokens ids[:, first + 1:] only."""
    if isinstance(scorer, ModelScorer | CachedScorer):
        return scorer(ids, first)
    scores = scorer(ids)
    return TokenScores(scores.loss[:, first:], scores.correct[:, first:])


def autocast(device: torch.device, precision: Precision) -> torch.autocast:
    """Return the autocast context of a precision."""
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return torch.autocast(device.type, dtypes.get(precision), enabled=precision in dtypes)


def batches(windows: int, rows: int) -> Iterator[slice]:
    """Yield slices of at most `rows` windows that cover all."""
    for first in range(0, windows, rows):
        yield slice(first, first + rows)


def batch_by_length(lengths: NDArray[np.int64], tokens: int) -> Iterator[list[int]]:
    """Yield batches of at most `tokens` padded tokens (at least one text), by ascending length."""
    group: list[int] = []
    for index in np.argsort(lengths, kind="stable").tolist():
        if group and (len(group) + 1) * int(lengths[index]) > tokens:
            yield group
            group = []
        group.append(index)
    if group:
        yield group


def set_identity(model: Identity, evaluation_set: AnySet, **factors: Factor) -> Identity:
    """Return the identity of the measurements of a model on a set."""
    return replace(
        model,
        protocol=evaluation_set.protocol,
        length=evaluation_set.length,
        train_length=evaluation_set.train_length,
        data=evaluation_set.fingerprint,
        factors={**model.factors, **factors},
    )


def weights_digest(module: nn.Module) -> str:
    """Return the SHA-256 of the state_dict: names, types, shapes and bytes."""
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        value = tensor.detach().cpu().contiguous()
        digest.update(f"{name}|{value.dtype}|{tuple(value.shape)}|".encode())
        # Viewed as bytes, because numpy has no bfloat16.
        digest.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
