"""What the protocols ask of a model: the loss and the correctness of every next token."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from normattn.kernels.cross_entropy import TokenScores
from normattn.models.causal_lm import CausalLM
from normattn.models.utils import without_dropout

TokenScorer = Callable[[Tensor], TokenScores]
"""Maps ids (b, T + 1) to the loss (b, T) in nats and the correctness (b, T) of tokens 1 … T."""

Precision = Literal["fp32", "bf16"]

_ROWS = 256  # logits rows turned into log-probabilities at a time


@dataclass(frozen=True)
class ModelScorer:
    """A `CausalLM` as a scorer; see `from_causal_lm`."""

    model: CausalLM
    precision: Precision

    def __call__(self, ids: Int[Tensor, "b t1"], first: int = 0) -> TokenScores:
        """The scores of the tokens ids[:, first + 1:]."""
        device = next(self.model.parameters()).device
        with without_dropout(self.model), torch.no_grad(), autocast(device, self.precision):
            return self.model.token_scores(ids.to(device), first)


def from_causal_lm(model: CausalLM, precision: Precision = "fp32") -> TokenScorer:
    """Score with a `CausalLM`, which streams its head: tokens × vocabulary never exists whole.

    The model is in evaluation mode and without gradient while it scores; every submodule's mode is
    then as it was. `precision` "bf16" scores under autocast.
    """
    return ModelScorer(model, precision)


def scores_from(scorer: TokenScorer, ids: Int[Tensor, "b t1"], first: int) -> TokenScores:
    """The scores of the tokens ids[:, first + 1:] alone; a model's head reads no others."""
    if isinstance(scorer, ModelScorer):
        return scorer(ids, first)
    scores = scorer(ids)
    return TokenScores(scores.loss[:, first:], scores.correct[:, first:])


def from_logits(
    logits_of: Callable[[Tensor], Tensor], precision: Precision = "fp32"
) -> TokenScorer:
    """Score with any callable from ids (b, T) to logits (b, T, V), one window at a time.

    A window's logits are turned into losses in float32, 256 rows at a time. A module is put into
    evaluation mode while it scores and its mode restored.
    """

    def score(ids: Int[Tensor, "b t1"]) -> TokenScores:
        mode = without_dropout(logits_of) if isinstance(logits_of, nn.Module) else nullcontext()
        device = _device(logits_of, ids)
        with mode, torch.no_grad(), autocast(device, precision):
            rows = [_score_window(logits_of, row.to(device)) for row in torch.split(ids, 1)]
        return TokenScores(
            loss=torch.cat([row.loss for row in rows]),
            correct=torch.cat([row.correct for row in rows]),
        )

    return score


def _score_window(logits_of: Callable[[Tensor], Tensor], ids: Int[Tensor, "1 t1"]) -> TokenScores:
    logits: Float[Tensor, "t v"] = logits_of(ids[:, :-1])[0]
    targets = ids[0, 1:]
    losses, correct = [], []
    for part, target in zip(torch.split(logits, _ROWS), torch.split(targets, _ROWS), strict=True):
        losses.append(nn.functional.cross_entropy(part.float(), target, reduction="none"))
        correct.append(part.argmax(dim=-1) == target)
    return TokenScores(loss=torch.cat(losses)[None], correct=torch.cat(correct)[None])


def _device(logits_of: Callable[[Tensor], Tensor], ids: Tensor) -> torch.device:
    if isinstance(logits_of, nn.Module):
        first = next(logits_of.parameters(), None)
        if first is not None:
            return first.device
    return ids.device


def autocast(device: torch.device, precision: Precision) -> torch.autocast:
    """Half precision inside, where it is asked for."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16")
