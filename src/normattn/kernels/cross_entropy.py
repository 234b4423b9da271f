"""Linear layer, cross-entropy and accuracy by chunks, without the (tokens × vocabulary) matrix.

loss = mean_i [ logsumexp_v(h_i·w_v) − (1 − ε) h_i·w_{y_i} − ε h_i·w̄ ],   w̄ = mean_v w_v

ε is the label smoothing (arXiv 1512.00567). It costs little: the mean logit is h·w̄.

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
    """Mean loss in nats, correct predictions, and `nll`, the loss without smoothing or gradient."""

    loss: Float[Tensor, ""]
    correct: Int[Tensor, ""]
    nll: Float[Tensor, ""]


class TokenScores(NamedTuple):
    """For each token the loss in nats, and whether the most likely token is correct."""

    loss: Float[Tensor, "*n"]
    correct: Bool[Tensor, "*n"]


def _buffers(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Buffers of a chunk's products and logits: the same one unless products are half precision."""
    products = hidden.new_empty(min(CHUNK, hidden.shape[0]), weight.shape[0])
    dtype = at_least_float32(hidden.dtype)
    return products, products if dtype == hidden.dtype else products.to(dtype)


def _softmax(
    hidden: Tensor, weight: Tensor, targets: Tensor, buffers: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """A chunk's probabilities (c, V), and the loss and correctness of each row."""
    products, logits = (x[: len(hidden)] for x in buffers)
    torch.mm(hidden, weight.T, out=products)
    if logits.dtype != products.dtype:
        logits.copy_(products)
    top = logits.amax(-1)
    target = logits.gather(-1, targets[:, None]).squeeze(-1)
    if logits.device.type != "cpu" or torch.compiler.is_compiling():
        correct = logits.argmax(-1) == targets
    else:
        # argmax is slow on a CPU: only for rows whose target may be the first of the highest.
        correct = target == top
        rows = correct.nonzero().squeeze(-1)
        correct[rows] = logits[rows].argmax(-1) == targets[rows]
    torch.softmax(logits, -1, out=logits)
    # The largest probability is exp(0) divided by the sum.
    return logits, top - logits.amax(-1).log() - target, correct


def _smoothing(hidden: Tensor, weight: Tensor, targets: Tensor, share: float) -> Tensor | float:
    """The label smoothing term of the summed loss: −ε Σ (h·w̄ − h·w_y)."""
    if not share:
        return 0.0
    dtype = at_least_float32(hidden.dtype)
    chunks = zip(torch.split(hidden, CHUNK), torch.split(targets, CHUNK), strict=True)
    parts = [(rows.to(dtype) * weight[target].to(dtype)).sum() for rows, target in chunks]
    target = torch.stack(parts).sum()
    return share * (target - hidden.sum(0, dtype=dtype) @ weight.to(dtype).mean(0))


def _sums(
    hidden: Tensor, weight: Tensor, targets: Tensor, share: float, needs_grad: tuple[bool, bool]
) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor | None, Tensor | None]]:
    """Sums over tokens: (loss, correct, loss without smoothing), and the gradients of both inputs.

    They are computed together, since all need the softmax.
    """
    dtype, weight_dtype = at_least_float32(hidden.dtype), weight.dtype
    weight = weight.to(hidden.dtype)
    grad_hidden = torch.empty_like(hidden) if needs_grad[0] else None
    grad_weight = torch.zeros_like(weight, dtype=dtype) if needs_grad[1] else None
    nll = hidden.new_zeros((), dtype=dtype)
    correct = torch.zeros((), dtype=torch.int64, device=hidden.device)
    buffers = _buffers(hidden, weight)
    for start in range(0, hidden.shape[0], CHUNK):
        rows = slice(start, start + CHUNK)
        p, row_loss, row_correct = _softmax(hidden[rows], weight, targets[rows], buffers)
        nll += row_loss.sum()
        correct += row_correct.sum()
        p.scatter_add_(1, targets[rows, None], p.new_full((p.shape[0], 1), share - 1.0))
        p = p if p.dtype == hidden.dtype else buffers[0][: len(p)].copy_(p)
        if grad_hidden is not None:
            torch.mm(p, weight, out=grad_hidden[rows])
        if grad_weight is not None and grad_weight.dtype == p.dtype:
            grad_weight.addmm_(p.T, hidden[rows])
        elif grad_weight is not None:
            # Half precision is summed in float32, by parts of the vocabulary.
            part = max(1, PART // hidden.shape[1]) if p.device.type == "cpu" else len(weight)
            for first in range(0, len(weight), part):
                words = slice(first, first + part)
                grad_weight[words] += p[:, words].T @ hidden[rows]
    loss = nll + _smoothing(hidden, weight, targets, share)
    if grad_hidden is not None and share:
        # −ε w̄ for each token; the term of the target is in p.
        grad_hidden.sub_((share * weight.to(dtype).mean(0)).to(grad_hidden.dtype))
    if grad_weight is not None and share:
        # −ε/V Σ h for each word.
        grad_weight.sub_(hidden.sum(0, dtype=dtype) * (share / len(grad_weight)))
    # A sum over tokens may exceed the range of float16, their mean does not.
    if grad_weight is not None and weight_dtype != torch.float16:
        grad_weight = grad_weight.to(weight_dtype)
    return (loss, correct, nll), (grad_hidden, grad_weight)


class _LinearCrossEntropy(torch.autograd.Function):
    """Gradients come from the forward; a second backward, of a retained graph, recomputes them."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, share: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        sums, ctx.gradients = _sums(hidden, weight, targets, share, ctx.needs_input_grad[:2])
        ctx.save_for_backward(hidden, weight, targets)
        ctx.share = share
        loss, correct, nll = sums[0] / len(hidden), sums[1], sums[2] / len(hidden)
        ctx.mark_non_differentiable(correct, nll)
        return loss, correct, nll

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("the chunked cross-entropy", "F.cross_entropy on the logits")
        hidden, weight, targets = ctx.saved_tensors
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            gradients = _sums(hidden, weight, targets, ctx.share, ctx.needs_input_grad[:2])[1]
        (grad_hidden, grad_weight), per_token = gradients, grads[0] / hidden.shape[0]
        grad_hidden = None if grad_hidden is None else grad_hidden.mul_(per_token)
        if grad_weight is not None:
            grad_weight = grad_weight.mul_(per_token).to(weight.dtype)
        return grad_hidden, grad_weight, None, None


def linear_cross_entropy(
    hidden: Float[Tensor, "n d"],
    weight: Float[Tensor, "v d"],
    targets: Int[Tensor, "n"],
    label_smoothing: float = 0.0,
) -> LinearCrossEntropy:
    """Mean cross-entropy of softmax(hidden · weightᵀ) against `targets`, and correct predictions.

    `label_smoothing` is the share ε of the target probability that is spread over all V tokens.
    Under autocast products are in its dtype; loss and weight gradient are summed in float32. Raises
    `InputError` without targets, and for a label smoothing outside 0 … 1.
    """
    if not targets.numel():
        raise InputError("there is no target to predict")
    if not 0 <= label_smoothing <= 1:
        raise InputError(f"label_smoothing is {label_smoothing}; it must be from 0 to 1")
    if torch.is_autocast_enabled(hidden.device.type):
        hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
    with torch.autocast(hidden.device.type, enabled=False):
        if use_plain_ops() and not torch.compiler.is_compiling():
            # torch's operations have every derivative, but need the whole (N, V) logits.
            logits = F.linear(hidden, weight.to(hidden.dtype)).to(at_least_float32(hidden.dtype))
            loss = F.cross_entropy(logits, targets, label_smoothing=label_smoothing)
            nll = F.cross_entropy(logits.detach(), targets)
            return LinearCrossEntropy(loss, (logits.argmax(-1) == targets).sum(), nll)
        if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
            return LinearCrossEntropy(
                *_LinearCrossEntropy.apply(hidden, weight, targets, label_smoothing)  # type: ignore[no-untyped-call]
            )
        loss, correct, nll = _sums(hidden, weight, targets, label_smoothing, (False, False))[0]
        return LinearCrossEntropy(loss / len(hidden), correct, nll / len(hidden))


@torch.no_grad()
def token_scores(
    hidden: Float[Tensor, "n d"],
    weight: Float[Tensor, "v d"],
    targets: Int[Tensor, "n"],
) -> TokenScores:
    """Loss and correctness of every token, without gradients."""
    weight = weight.to(hidden.dtype)
    buffers = _buffers(hidden, weight)
    chunks = zip(torch.split(hidden, CHUNK), torch.split(targets, CHUNK), strict=True)
    parts = [_softmax(rows, weight, target, buffers)[1:] for rows, target in chunks]
    return TokenScores(*(torch.cat(results) for results in zip(*parts, strict=True)))
