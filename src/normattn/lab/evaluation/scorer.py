"""What the protocols ask of a model: the loss and the correctness of every next token.

Also whose measurement it is, and a scorer that reads windows once which several protocols share.
"""

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

from normattn.errors import InputError
from normattn.kernels.cross_entropy import TokenScores
from normattn.lab.data.retrieval import RetrievalSet
from normattn.lab.data.windows import EvaluationSet
from normattn.lab.stats import Identity
from normattn.lab.stats.measurements import Factor
from normattn.models.causal_lm import CausalLM
from normattn.models.utils import without_dropout

TokenScorer = Callable[[Tensor], TokenScores]
"""Maps ids (b, T + 1) to the loss (b, T) in nats and the correctness (b, T) of tokens 1 … T."""

Precision = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True)
class ModelScorer:
    """Scores with a `CausalLM`, which streams its head: tokens × vocabulary never exists whole.

    The model is in evaluation mode and without gradient while it scores; every submodule's mode is
    then as it was. `precision` "bf16" or "fp16" scores under autocast.
    """

    model: CausalLM
    precision: Precision = "fp32"

    def __call__(self, ids: Int[Tensor, "b t1"], first: int = 0) -> TokenScores:
        """The scores of the tokens ids[:, first + 1:]."""
        device = next(self.model.parameters()).device
        with without_dropout(self.model), torch.no_grad(), autocast(device, self.precision):
            return self.model.token_scores(ids.to(device), first)


@dataclass(frozen=True)
class Remembering:
    """Call `scorer` once for a batch of windows that is in several sets.

    The longest natural text, the last segment behind the longest context and the text that is read
    by position are the same windows where the same number of them is asked for. The scores, 5 bytes
    a token, are the very numbers that `scorer` gave. The model must not change meanwhile.
    """

    scorer: TokenScorer
    _known: dict[bytes, tuple[int, TokenScores]] = field(default_factory=dict)

    def __call__(self, ids: Int[Tensor, "b t1"], first: int = 0) -> TokenScores:
        """The scores of the tokens ids[:, first + 1:]."""
        key = hashlib.sha256(repr(tuple(ids.shape)).encode() + ids.numpy().tobytes()).digest()
        if key not in self._known or self._known[key][0] > first:
            # A model's head reads no other tokens than those that are wanted.
            start = first if isinstance(self.scorer, ModelScorer) else 0
            self._known[key] = start, scores_from(self.scorer, ids, start)
        start, scores = self._known[key]
        return TokenScores(scores.loss[:, first - start :], scores.correct[:, first - start :])


def scores_from(scorer: TokenScorer, ids: Int[Tensor, "b t1"], first: int) -> TokenScores:
    """The scores of the tokens ids[:, first + 1:] alone."""
    if isinstance(scorer, ModelScorer | Remembering):
        return scorer(ids, first)
    scores = scorer(ids)
    return TokenScores(scores.loss[:, first:], scores.correct[:, first:])


def autocast(device: torch.device, precision: Precision) -> torch.autocast:
    """Half precision inside, where it is asked for."""
    return torch.autocast(
        device.type,
        dtype=torch.float16 if precision == "fp16" else torch.bfloat16,
        enabled=precision != "fp32",
    )


AnySet = EvaluationSet | RetrievalSet


def rows_within(tokens: int, length: int) -> int:
    """How many windows of `length` are scored at once within `tokens`; one is the least."""
    if tokens < 1:
        raise InputError(f"tokens_per_batch must be at least 1, got {tokens}")
    return max(1, tokens // length)


def batches(windows: int, rows: int) -> Iterator[slice]:
    """Slices of at most `rows` windows that cover them all."""
    for first in range(0, windows, rows):
        yield slice(first, first + rows)


def by_length(lengths: NDArray[np.int64], tokens: int) -> Iterator[list[int]]:
    """Texts of rising length, as many at a time as make up `tokens` padded ones, or one."""
    group: list[int] = []
    for index in np.argsort(lengths, kind="stable").tolist():
        if group and (len(group) + 1) * int(lengths[index]) > tokens:
            yield group
            group = []
        group.append(index)
    if group:
        yield group


def identity(whose: Identity, chosen: AnySet, **factors: Factor) -> Identity:
    """The identity of what is measured of `whose` model on the set `chosen`."""
    return replace(
        whose,
        protocol=chosen.protocol,
        length=chosen.length,
        train_length=chosen.train_length,
        data=chosen.fingerprint,
        factors={**whose.factors, **factors},
    )


def weights_digest(module: nn.Module) -> str:
    """SHA-256 of every parameter and saved buffer of `module`, by name, type, shape and bytes."""
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        value = tensor.detach().cpu().contiguous()
        digest.update(f"{name}|{value.dtype}|{tuple(value.shape)}|".encode())
        # Viewed as bytes because numpy knows no bfloat16.
        digest.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
