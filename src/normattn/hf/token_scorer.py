"""Losses of every next token of a transformers model, with the logits computed in chunks.

The logits of a long text, tokens × vocabulary, take gigabytes. The decoder's output does not, so
the decoder runs once and the head runs on a few rows at a time.

Legend: B batch, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from normattn.errors import InputError
from normattn.hf.model_parts import model_parts
from normattn.kernels import TokenScores

_ROWS = 256


def token_scorer(model: Any) -> Callable[[Tensor], TokenScores]:
    """Maps ids (B, T + 1) to the loss in nats and the correctness of tokens 1 … T.

    It is a scorer of `normattn.lab.evaluation`, for the current state of the model, extended
    or not. Raises `InputError` for a model whose logits are not a function of each row of its
    decoder's output, and when called with tokens beyond the model's vocabulary.
    """
    decoder, head = model_parts(model).decoder, _head_of(model)

    def score(ids: Int[Tensor, "b t1"]) -> TokenScores:
        refuse_foreign_tokens(ids, model)
        ids = ids.to(model.device)
        loss, correct = [], []
        with torch.no_grad():
            rows = decoder(ids[:, :-1], use_cache=False).last_hidden_state.flatten(0, 1)
            targets = torch.split(ids[:, 1:].flatten(), _ROWS)
            for chunk, target in zip(torch.split(rows, _ROWS), targets, strict=True):
                logits = head(chunk).float()
                loss.append(torch.nn.functional.cross_entropy(logits, target, reduction="none"))
                correct.append(logits.argmax(-1) == target)
        shape = (ids.shape[0], ids.shape[1] - 1)
        return TokenScores(loss=torch.cat(loss).view(shape), correct=torch.cat(correct).view(shape))

    return score


def refuse_foreign_tokens(ids: Int[Tensor, "..."], model: Any) -> None:
    """Raise `InputError` for tokens beyond the model's embeddings."""
    rows, largest = model.get_input_embeddings().weight.shape[0], int(ids.max())
    if largest >= rows:
        raise InputError(
            f"the tokeniser gives token {largest:,}, but the vocabulary of {type(model).__name__} "
            f"has {rows:,}: it is the tokeniser of another model"
        )


def _head_of(model: Any) -> Callable[[Float[Tensor, "r d"]], Float[Tensor, "r v"]]:
    """The map from rows of the decoder's output to logits, checked on a few tokens."""
    linear, config = model.get_output_embeddings(), model.config.get_text_config()
    cap = getattr(config, "final_logit_softcapping", None)
    scale = getattr(config, "logit_scale", None) or 1.0
    scale = scale / (getattr(config, "logits_scaling", None) or 1.0)
    if linear is None:
        raise InputError(f"{type(model).__name__} has no head that makes logits")

    def head(rows: Tensor) -> Tensor:
        logits: Tensor = linear(rows)
        logits = logits if scale == 1 else logits * scale
        return logits if cap is None else torch.tanh(logits / cap) * cap

    ids = torch.arange(3, device=model.device)[None] % config.vocab_size
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        logits = head(model_parts(model).decoder(ids, use_cache=False).last_hidden_state)
    if expected.shape != logits.shape or not torch.allclose(expected, logits, rtol=1e-3, atol=1e-3):
        raise InputError(
            f"{type(model).__name__} computes its logits in its own way, so they cannot be "
            "scored a few rows at a time"
        )
    return head
