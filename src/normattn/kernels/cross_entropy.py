"""Linear + cross-entropy + accuracy by chunks of rows: the (tokens × vocabulary) matrix never is.

loss = mean_i [ logsumexp_v(h_i·w_v) − (1 − ε) h_i·w_{y_i} − ε h_i·w̄ ],   w̄ = mean_v w_v

ε is the label smoothing (arXiv 1512.00567): the mean logit is one product with the mean weight, so
that smoothing costs next to nothing.

Legend: N tokens, D width, V vocabulary, c rows of a chunk.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from normattn.errors import InputError
from normattn.kernels.numerics import at_least_float32, refuse_second_derivative
from normattn.plain import use_plain_ops

# Rows of a chunk.
CHUNK = 256
# Numbers of the weight's gradient that are converted from half precision at once on a CPU.
PART = 2**20


class LinearCrossEntropy(NamedTuple):
    """Mean loss in nats (differentiable), the number of tokens predicted rightly, and `nll`.

    `nll` is the mean loss without label smoothing, and without a gradient.
    """

    loss: Float[Tensor, ""]
    correct: Int[Tensor, ""]
    nll: Float[Tensor, ""]


class TokenScores(NamedTuple):
    """Loss in nats and whether the most likely token is the right one, for each token."""

    loss: Float[Tensor, "*n"]
    correct: Bool[Tensor, "*n"]


def _buffers(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Room for the products of a chunk, and for its logits: another where products are half."""
    products = hidden.new_empty(min(CHUNK, hidden.shape[0]), weight.shape[0])
    wide = at_least_float32(hidden.dtype)
    return products, products if wide == hidden.dtype else products.to(wide)


def _softmax(
    hidden: Tensor, weight: Tensor, targets: Tensor, buffers: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Of a chunk the weights (c, V), and of each row the loss and whether it is a hit."""
    products, logits = (x[: len(hidden)] for x in buffers)
    torch.mm(hidden, weight.T, out=products)
    if logits.dtype != products.dtype:
        logits.copy_(products)
    top = logits.amax(-1)
    target = logits.gather(-1, targets[:, None]).squeeze(-1)
    hit = _hits(logits, targets, target == top)
    torch.softmax(logits, -1, out=logits)
    # The largest weight is exp(0) over the sum.
    return logits, top - logits.amax(-1).log() - target, hit


def _hits(logits: Tensor, targets: Tensor, highest: Tensor) -> Tensor:
    """Whether the first of the highest logits is the target's.

    `highest` says where none is higher; only there on a CPU is the (slow) argmax taken.
    """
    if logits.device.type != "cpu" or torch.compiler.is_compiling():
        return logits.argmax(-1) == targets
    rows = highest.nonzero().squeeze(-1)
    return highest.index_copy(0, rows, logits[rows].argmax(-1) == targets[rows])


def _accumulate(total: Tensor, p: Tensor, rows: Tensor) -> None:
    """total += pᵀ · rows, in the type of `total`; half products by parts of the vocabulary."""
    if total.dtype == p.dtype:
        total.addmm_(p.T, rows)
        return
    part = max(1, PART // rows.shape[1]) if p.device.type == "cpu" else len(total)
    for start in range(0, len(total), part):
        words = slice(start, start + part)
        total[words] += p[:, words].T @ rows


def _smoothing(hidden: Tensor, weight: Tensor, targets: Tensor, share: float) -> Tensor | float:
    """What label smoothing adds to the sum of the losses: −ε(h·w̄ − h·w_y) of every token."""
    if not share:
        return 0.0
    wide, parts = at_least_float32(hidden.dtype), []
    for start in range(0, hidden.shape[0], CHUNK):
        rows = slice(start, start + CHUNK)
        parts.append((hidden[rows].to(wide) * weight[targets[rows]].to(wide)).sum())
    own = torch.stack(parts).sum() if parts else 0.0
    return share * (own - hidden.sum(0, dtype=wide) @ weight.to(wide).mean(0))


class _Sums(NamedTuple):
    """Sums over the tokens: loss, hits, and the loss's gradients where they are wanted."""

    loss: Tensor
    nll: Tensor
    correct: Tensor
    by_hidden: Tensor | None
    by_weight: Tensor | None


def _sums(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    share: float,
    wanted: tuple[bool, bool],
) -> _Sums:
    """Gradients are made where the softmax is at hand."""
    wide, given, weight = at_least_float32(hidden.dtype), weight, weight.to(hidden.dtype)
    by_hidden = torch.empty_like(hidden) if wanted[0] else None
    by_weight = torch.zeros_like(given, dtype=wide) if wanted[1] else None
    nll = hidden.new_zeros((), dtype=wide)
    correct = torch.zeros((), dtype=torch.int64, device=hidden.device)
    buffers = _buffers(hidden, weight)
    for start in range(0, hidden.shape[0], CHUNK):
        rows = slice(start, start + CHUNK)
        p, row_loss, hit = _softmax(hidden[rows], weight, targets[rows], buffers)
        nll += row_loss.sum()
        correct += hit.sum()
        p.scatter_add_(1, targets[rows, None], p.new_full((p.shape[0], 1), share - 1.0))
        p = p if p.dtype == hidden.dtype else buffers[0][: len(p)].copy_(p)
        if by_hidden is not None:
            torch.mm(p, weight, out=by_hidden[rows])
        if by_weight is not None:
            _accumulate(by_weight, p, hidden[rows])
    loss = nll + _smoothing(hidden, weight, targets, share)
    if by_hidden is not None and share:
        # −ε w̄ for each token; the target's own share is in the weights of softmax.
        by_hidden.sub_((share * weight.to(wide).mean(0)).to(by_hidden.dtype))
    if by_weight is not None and share:
        # −ε/V Σ h for each word.
        by_weight.sub_(hidden.sum(0, dtype=wide) * (share / len(by_weight)))
    # A sum over tokens may be beyond float16, where their mean is not.
    if by_weight is not None and given.dtype != torch.float16:
        by_weight = by_weight.to(given.dtype)
    return _Sums(loss, nll, correct, by_hidden, by_weight)


class _LinearCrossEntropy(torch.autograd.Function):
    """Gradients are made in the forward and scaled, in place, by the first backward.

    A second backward through a retained graph computes them again.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, share: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        sums = _sums(hidden, weight, targets, share, ctx.needs_input_grad[:2])
        ctx.save_for_backward(hidden, weight, targets)
        ctx.share, ctx.sums = share, sums
        nll = sums.nll / hidden.shape[0]
        ctx.mark_non_differentiable(sums.correct, nll)
        return sums.loss / hidden.shape[0], sums.correct, nll

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("the chunked cross-entropy", "F.cross_entropy on the logits")
        hidden, weight, targets = ctx.saved_tensors
        sums, ctx.sums = ctx.sums, None
        if sums is None:
            sums = _sums(hidden, weight, targets, ctx.share, ctx.needs_input_grad[:2])
        per_token = grads[0] / hidden.shape[0]
        by_hidden, by_weight = sums.by_hidden, sums.by_weight
        return (
            None if by_hidden is None else by_hidden.mul_(per_token),
            None if by_weight is None else by_weight.mul_(per_token).to(weight.dtype),
            *(None, None),
        )


def linear_cross_entropy(
    hidden: Float[Tensor, "n d"],
    weight: Float[Tensor, "v d"],
    targets: Int[Tensor, "n"],
    label_smoothing: float = 0.0,
) -> LinearCrossEntropy:
    """Mean cross-entropy of softmax(hidden · weightᵀ) against `targets`, and the hits.

    `label_smoothing` is the share ε of the target's weight that all V words get alike. Under
    autocast the products run in its dtype; loss and weight gradient gather in float32. Raises
    `InputError` for a label smoothing outside 0 … 1.
    """
    if not 0 <= label_smoothing <= 1:
        raise InputError(f"label_smoothing is {label_smoothing}; it must be from 0 to 1")
    if torch.is_autocast_enabled(hidden.device.type):
        hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
    with torch.autocast(hidden.device.type, enabled=False):
        if use_plain_ops() and not torch.compiler.is_compiling():
            # torch's own operations: every derivative, and the (N, V) logits whole.
            logits = F.linear(hidden, weight.to(hidden.dtype)).to(at_least_float32(hidden.dtype))
            loss = F.cross_entropy(logits, targets, label_smoothing=label_smoothing)
            nll = F.cross_entropy(logits.detach(), targets)
            return LinearCrossEntropy(loss, (logits.argmax(-1) == targets).sum(), nll)
        if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
            return LinearCrossEntropy(
                *_LinearCrossEntropy.apply(hidden, weight, targets, label_smoothing)  # type: ignore[no-untyped-call]
            )
        scores = token_scores(hidden, weight, targets)
        nll = scores.loss.mean()
        smoothing = _smoothing(hidden, weight, targets, label_smoothing)
        loss = nll + smoothing / max(1, len(targets))
        return LinearCrossEntropy(loss, scores.correct.sum(), nll)


@torch.no_grad()
def token_scores(
    hidden: Float[Tensor, "n d"],
    weight: Float[Tensor, "v d"],
    targets: Int[Tensor, "n"],
) -> TokenScores:
    """Loss and hit of every token, without gradients."""
    weight, parts = weight.to(hidden.dtype), []
    buffers = _buffers(hidden, weight)
    for start in range(0, hidden.shape[0], CHUNK):
        rows = slice(start, start + CHUNK)
        parts.append(_softmax(hidden[rows], weight, targets[rows], buffers)[1:])
    if not parts:
        none = hidden.new_zeros(0, dtype=at_least_float32(hidden.dtype))
        return TokenScores(none, targets.new_zeros(0, dtype=torch.bool))
    return TokenScores(*(torch.cat(each) for each in zip(*parts, strict=True)))
