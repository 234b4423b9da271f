"""What the protocols ask of a model: the loss and the correctness of every next token.

Also whose measurement it is, and scorers that read windows once which several protocols share.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

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
    then as it was. `precision` "bf16" or "fp16" scores under autocast.
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
    return torch.autocast(
        device.type,
        dtype=torch.float16 if precision == "fp16" else torch.bfloat16,
        enabled=precision != "fp32",
    )


AnySet = EvaluationSet | RetrievalSet


def batches(windows: int, rows: int) -> Iterator[slice]:
    """Slices of at most `rows` windows that cover them all."""
    for first in range(0, windows, rows):
        yield slice(first, first + rows)


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


ScorerOf = Callable[[AnySet], TokenScorer]
"""Which scorer reads a set; asked once for each set, in the order in which they are read."""


def recalling(scorer: TokenScorer, sets: Sequence[AnySet]) -> ScorerOf:
    """Scorers of `sets` that ask `scorer` once for windows that stand in several of them.

    The longest natural text, the last segment behind the longest context and the text that is read
    by position are the same windows where the same number of them is asked for. Their scores, 5
    bytes a token, are kept until the last of these sets is read; they are the very numbers that
    `scorer` gave, and batches of other rows are scored anew. The model must not change meanwhile.
    """
    left = Counter(_text(chosen) for chosen in sets)
    kept: dict[str, _Recalled] = {}

    def scorer_of(chosen: AnySet) -> TokenScorer:
        text = _text(chosen)
        left[text] -= 1
        if left[text]:
            return kept.setdefault(text, _Recalled(scorer))
        return kept.pop(text, scorer)

    return scorer_of


class _Recalled:
    """A scorer that remembers every batch."""

    def __init__(self, scorer: TokenScorer) -> None:
        self._scorer = scorer
        self._scores: dict[bytes, TokenScores] = {}

    def __call__(self, ids: Int[Tensor, "b t1"]) -> TokenScores:
        """The scores of these rows."""
        key = hashlib.sha256(repr(tuple(ids.shape)).encode() + ids.numpy().tobytes()).digest()
        if key not in self._scores:
            self._scores[key] = self._scorer(ids)
        return self._scores[key]


def _text(chosen: AnySet) -> str:
    """What identifies the windows of a set; only those of whole texts recur."""
    if not isinstance(chosen, EvaluationSet):
        return chosen.fingerprint
    windows = np.ascontiguousarray(chosen.windows, dtype="<i8")
    return hashlib.sha256(repr(windows.shape).encode() + windows.tobytes()).hexdigest()
