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

CHUNK = 256
# Numbers of the weight's gradient that are converted from half precision at once on a CPU.
PART = 2**20


class LinearCrossEntropy(NamedTuple):
    """Mean loss in nats (differentiable) and the number of tokens predicted rightly."""

    loss: Float[Tensor, ""]
    correct: Int[Tensor, ""]


class TokenScores(NamedTuple):
    """Loss in nats and whether the most likely token is the right one, for each token."""

    loss: Float[Tensor, "*n"]
    correct: Bool[Tensor, "*n"]


class _Room:
    """Logits of a chunk: one buffer for all chunks, and a second where the products are half."""

    def __init__(self, hidden: Tensor, weight: Tensor, chunk: int) -> None:
        self.weight = weight.to(hidden.dtype)
        shape = min(chunk, hidden.shape[0]), weight.shape[0]
        self.products = hidden.new_empty(shape)
        wide = _wide(hidden)
        self.logits = self.products if wide == hidden.dtype else hidden.new_empty(shape, dtype=wide)

    def softmax(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of a chunk the weights (c, V), and of each row the loss and whether it is a hit."""
        products, logits = self.products[: len(hidden)], self.logits[: len(hidden)]
        torch.mm(hidden, self.weight.T, out=products)
        if logits.dtype != products.dtype:
            logits.copy_(products)
        top = logits.amax(-1)
        target = logits.gather(-1, targets[:, None]).squeeze(-1)
        hit = _hits(logits, targets, target == top)
        torch.softmax(logits, -1, out=logits)
        # The largest weight is exp(0) over the sum.
        return logits, top - logits.amax(-1).log() - target, hit

    def operand(self, weights: Tensor) -> Tensor:
        """The weights in the type of the products."""
        if weights.dtype == self.products.dtype:
            return weights
        return self.products[: len(weights)].copy_(weights)


def _accumulate(total: Tensor, p: Tensor, rows: Tensor) -> None:
    """total += pᵀ · rows, in the type of `total`; half products by parts of the vocabulary."""
    if total.dtype == p.dtype:
        total.addmm_(p.T, rows)
        return
    part = max(1, PART // rows.shape[1]) if p.device.type == "cpu" else len(total)
    for start in range(0, len(total), part):
        words = slice(start, start + part)
        total[words] += p[:, words].T @ rows


def _hits(logits: Tensor, targets: Tensor, highest: Tensor) -> Tensor:
    """Whether the first of the highest logits is the target's.

    `highest` says where none is higher; only there on a CPU is the (slow) argmax taken.
    """
    if logits.device.type != "cpu" or torch.compiler.is_compiling():
        return logits.argmax(-1) == targets
    rows = highest.nonzero().squeeze(-1)
    return highest.index_copy(0, rows, logits[rows].argmax(-1) == targets[rows])


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


class _Sums(NamedTuple):
    """Sums over the tokens: loss, hits, and the loss's gradients where they are wanted."""

    loss: Tensor
    correct: Tensor
    by_hidden: Tensor | None
    by_weight: Tensor | None


def _sums(
    hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int, wanted: tuple[bool, bool]
) -> _Sums:
    """Gradients are made where the softmax is at hand."""
    room, wide = _Room(hidden, weight, chunk), _wide(hidden)
    by_hidden = torch.empty_like(hidden) if wanted[0] else None
    by_weight = torch.zeros_like(weight, dtype=wide) if wanted[1] else None
    loss = hidden.new_zeros((), dtype=wide)
    correct = torch.zeros((), dtype=torch.int64, device=hidden.device)
    for start in range(0, hidden.shape[0], chunk):
        rows = slice(start, start + chunk)
        p, row_loss, hit = room.softmax(hidden[rows], targets[rows])
        loss += row_loss.sum()
        correct += hit.sum()
        p.scatter_add_(1, targets[rows, None], p.new_full((p.shape[0], 1), -1.0))
        p = room.operand(p)
        if by_hidden is not None:
            torch.mm(p, room.weight, out=by_hidden[rows])
        if by_weight is not None:
            _accumulate(by_weight, p, hidden[rows])
    by_weight = None if by_weight is None else by_weight.to(weight.dtype)
    return _Sums(loss, correct, by_hidden, by_weight)


class _LinearCrossEntropy(torch.autograd.Function):
    """Gradients are made in the forward and scaled, in place, by the first backward.

    A second backward through a retained graph computes them again.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int
    ) -> tuple[Tensor, Tensor]:
        sums = _sums(hidden, weight, targets, chunk, ctx.needs_input_grad[:2])
        ctx.save_for_backward(hidden, weight, targets)
        ctx.chunk, ctx.tokens, ctx.sums = chunk, hidden.shape[0], sums
        ctx.mark_non_differentiable(sums.correct)
        return sums.loss / hidden.shape[0], sums.correct

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        refuse_second_derivative("the chunked cross-entropy", "F.cross_entropy on the logits")
        sums, ctx.sums = ctx.sums, None
        if sums is None:
            hidden, weight, targets = ctx.saved_tensors
            sums = _sums(hidden, weight, targets, ctx.chunk, ctx.needs_input_grad[:2])
        each = grads[0] / ctx.tokens
        by_hidden = None if sums.by_hidden is None else sums.by_hidden.mul_(each)
        by_weight = None if sums.by_weight is None else sums.by_weight.mul_(each)
        return by_hidden, by_weight, None, None


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
    room = _Room(hidden, weight, chunk)
    parts = []
    for start in range(0, hidden.shape[0], chunk):
        rows = slice(start, start + chunk)
        parts.append(room.softmax(hidden[rows], targets[rows])[1:])
    if not parts:
        none = hidden.new_zeros(0, dtype=_wide(hidden))
        return TokenScores(none, targets.new_zeros(0, dtype=torch.bool))
    return TokenScores(torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts]))
