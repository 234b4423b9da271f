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

    def of_window(ids: Int[Tensor, "1 t1"]) -> tuple[Tensor, Tensor]:
        logits: Float[Tensor, "t v"] = logits_of(ids[:, :-1])[0]
        pairs = zip(torch.split(logits, _ROWS), torch.split(ids[0, 1:], _ROWS), strict=True)
        loss, correct = [], []
        for part, target in pairs:
            loss.append(nn.functional.cross_entropy(part.float(), target, reduction="none"))
            correct.append(part.argmax(dim=-1) == target)
        return torch.cat(loss), torch.cat(correct)

    def score(ids: Int[Tensor, "b t1"]) -> TokenScores:
        mode = without_dropout(logits_of) if isinstance(logits_of, nn.Module) else nullcontext()
        module = logits_of if isinstance(logits_of, nn.Module) else nn.Module()
        device = next((p.device for p in module.parameters()), ids.device)
        with mode, torch.no_grad(), autocast(device, precision):
            scored = [of_window(window.to(device)) for window in torch.split(ids, 1)]
        return TokenScores(*(torch.stack(each) for each in zip(*scored, strict=True)))

    return score


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


def recalling(scorer: TokenScorer, sets: Sequence[AnySet]) -> Callable[[AnySet], TokenScorer]:
    """Scorers of `sets` that ask `scorer` once for windows that stand in several of them.

    To be asked once for each set, in the order in which they are read. The longest natural text,
    the last segment behind the longest context and the text that is read by position are the same
    windows where the same number of them is asked for. Their scores, 5 bytes a token, are kept
    until the last of these sets is read; they are the very numbers that `scorer` gave. The model
    must not change meanwhile.
    """
    left = Counter(_text(chosen) for chosen in sets)
    kept: dict[str, TokenScorer] = {}

    def scorer_of(chosen: AnySet) -> TokenScorer:
        text = _text(chosen)
        left[text] -= 1
        if left[text]:
            return kept.setdefault(text, _remembering(scorer))
        return kept.pop(text, scorer)

    return scorer_of


def _remembering(scorer: TokenScorer) -> TokenScorer:
    """A scorer that remembers every batch."""
    known: dict[bytes, TokenScores] = {}

    def score(ids: Int[Tensor, "b t1"]) -> TokenScores:
        key = hashlib.sha256(repr(tuple(ids.shape)).encode() + ids.numpy().tobytes()).digest()
        if key not in known:
            known[key] = scorer(ids)
        return known[key]

    return score


def _text(chosen: AnySet) -> str:
    """What identifies the windows of a set; only those of whole texts recur."""
    if not isinstance(chosen, EvaluationSet):
        return chosen.fingerprint
    windows = np.ascontiguousarray(chosen.windows, dtype="<i8")
    return hashlib.sha256(repr(windows.shape).encode() + windows.tobytes()).hexdigest()
