"""Linear + cross-entropy + accuracy by chunks of rows: the (tokens × vocabulary) matrix never is.

loss = mean_i [ logsumexp_v(h_i·w_v) − h_i·w_{y_i} ]

Legend: N tokens, D width, V vocabulary, c rows of a chunk.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from normattn.errors import InputError
from normattn.kernels.derivatives import refuse_second_derivative

CHUNK = 512


class LinearCrossEntropy(NamedTuple):
    """Mean loss in nats (differentiable) and the number of tokens predicted rightly."""

    loss: Float[Tensor, ""]
    correct: Int[Tensor, ""]


class TokenScores(NamedTuple):
    """Loss in nats and whether the most likely token is the right one, for each token."""

    loss: Float[Tensor, "*n"]
    correct: Bool[Tensor, "*n"]


def _softmax_(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Loss and hit of each row; `logits` (c, V) is overwritten by its softmax."""
    top, best = logits.max(-1, keepdim=True)
    target = logits.gather(-1, targets[:, None])
    total = logits.sub_(top).exp_().sum(-1, keepdim=True)
    loss = total.log() + (top - target)
    return logits.div_(total), loss.squeeze(-1), best.squeeze(-1) == targets


class _LinearCrossEntropy(torch.autograd.Function):
    """Gradients are made in the forward, where the softmax is at hand, and scaled afterwards."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int
    ) -> tuple[Tensor, Tensor]:
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        dtype = hidden.dtype
        cast = weight.to(dtype)
        by_hidden = torch.empty_like(hidden)
        by_weight = torch.zeros_like(weight, dtype=wide)
        loss = hidden.new_zeros((), dtype=wide)
        correct = torch.zeros((), dtype=torch.int64, device=hidden.device)
        for start in range(0, hidden.shape[0], chunk):
            rows = slice(start, start + chunk)
            p, row_loss, hit = _softmax_((hidden[rows] @ cast.T).to(wide), targets[rows])
            loss += row_loss.sum()
            correct += hit.sum()
            p.scatter_add_(1, targets[rows, None], p.new_full((p.shape[0], 1), -1.0))
            p = p.div_(hidden.shape[0]).to(dtype)
            by_hidden[rows] = p @ cast
            if dtype == wide:
                by_weight.addmm_(p.T, hidden[rows])
            else:
                by_weight += p.T @ hidden[rows]
        ctx.save_for_backward(by_hidden, by_weight.to(weight.dtype))
        ctx.mark_non_differentiable(correct)
        return loss / hidden.shape[0], correct

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        refuse_second_derivative("the chunked cross-entropy", "F.cross_entropy on the logits")
        by_hidden, by_weight = ctx.saved_tensors
        by_loss = grads[0]
        return by_hidden * by_loss.to(by_hidden.dtype), by_weight * by_loss, None, None


def linear_cross_entropy(
    hidden: Float[Tensor, "n d"],
    weight: Float[Tensor, "v d"],
    targets: Int[Tensor, "n"],
    chunk: int = CHUNK,
) -> LinearCrossEntropy:
    """Mean cross-entropy of softmax(hidden · weightᵀ) against `targets`, and the hits.

    Under autocast the products run in its dtype; loss and weight gradient gather in float32.
    """
    _check_chunk(chunk)
    if torch.is_autocast_enabled(hidden.device.type):
        hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
    with torch.autocast(hidden.device.type, enabled=False):
        if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
            loss, correct = _LinearCrossEntropy.apply(hidden, weight, targets, chunk)  # type: ignore[no-untyped-call]
            return LinearCrossEntropy(loss, correct)
        scores = token_scores(hidden, weight, targets, chunk)
        return LinearCrossEntropy(scores.loss.mean(), scores.correct.sum())


def _check_chunk(chunk: int) -> None:
    if chunk < 1:
        raise InputError(f"cross-entropy goes by chunks of at least 1 row, but chunk is {chunk}")


@torch.no_grad()
def token_scores(
    hidden: Float[Tensor, "n d"],
    weight: Float[Tensor, "v d"],
    targets: Int[Tensor, "n"],
    chunk: int = CHUNK,
) -> TokenScores:
    """Loss and hit of every token, without gradients."""
    _check_chunk(chunk)
    wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    cast = weight.to(hidden.dtype)
    parts = []
    for start in range(0, hidden.shape[0], chunk):
        rows = slice(start, start + chunk)
        parts.append(_softmax_((hidden[rows] @ cast.T).to(wide), targets[rows])[1:])
    if not parts:
        return TokenScores(hidden.new_zeros(0, dtype=wide), targets.new_zeros(0, dtype=torch.bool))
    return TokenScores(torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts]))
