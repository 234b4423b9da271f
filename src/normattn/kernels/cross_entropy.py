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
from normattn.kernels.numerics import refuse_second_derivative
from normattn.plain import plain

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


class _Smoothing:
    """What label smoothing adds to the sums over the tokens: −ε(h·w̄ − h·w_y) and its gradients."""

    def __init__(self, weight: Tensor, wide: torch.dtype, share: float) -> None:
        self.share = share
        self.mean = weight.to(wide).mean(0) if share else None

    def loss(self, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor | float:
        """The sum over these tokens."""
        if self.mean is None:
            return 0.0
        wide = hidden.to(self.mean.dtype)
        own = (wide * weight[targets].to(wide.dtype)).sum()
        return self.share * (own - wide.sum(0) @ self.mean)

    def add_by_hidden(self, by_hidden: Tensor) -> None:
        """−ε w̄ for each token; the target's own share is in the weights of softmax."""
        if self.mean is not None:
            by_hidden.sub_((self.share * self.mean).to(by_hidden.dtype))

    def add_by_weight(self, by_weight: Tensor, hidden: Tensor) -> None:
        """−ε/V Σ h for each word."""
        if self.mean is not None:
            by_weight.sub_(hidden.to(by_weight.dtype).sum(0) * (self.share / len(by_weight)))


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
    chunk: int,
    share: float,
    wanted: tuple[bool, bool],
) -> _Sums:
    """Gradients are made where the softmax is at hand."""
    room, wide = _Room(hidden, weight, chunk), _wide(hidden)
    smoothing = _Smoothing(weight, wide, share)
    by_hidden = torch.empty_like(hidden) if wanted[0] else None
    by_weight = torch.zeros_like(weight, dtype=wide) if wanted[1] else None
    nll = hidden.new_zeros((), dtype=wide)
    smooth = hidden.new_zeros((), dtype=wide)
    correct = torch.zeros((), dtype=torch.int64, device=hidden.device)
    for start in range(0, hidden.shape[0], chunk):
        rows = slice(start, start + chunk)
        p, row_loss, hit = room.softmax(hidden[rows], targets[rows])
        nll += row_loss.sum()
        smooth += smoothing.loss(hidden[rows], room.weight, targets[rows])
        correct += hit.sum()
        p.scatter_add_(1, targets[rows, None], p.new_full((p.shape[0], 1), share - 1.0))
        p = room.operand(p)
        if by_hidden is not None:
            torch.mm(p, room.weight, out=by_hidden[rows])
        if by_weight is not None:
            _accumulate(by_weight, p, hidden[rows])
    if by_hidden is not None:
        smoothing.add_by_hidden(by_hidden)
    if by_weight is not None:
        smoothing.add_by_weight(by_weight, hidden)
        # A sum over tokens may be beyond float16, where their mean is not.
        by_weight = by_weight if weight.dtype == torch.float16 else by_weight.to(weight.dtype)
    return _Sums(nll + smooth, nll, correct, by_hidden, by_weight)


class _LinearCrossEntropy(torch.autograd.Function):
    """Gradients are made in the forward and scaled, in place, by the first backward.

    A second backward through a retained graph computes them again.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int, share: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        sums = _sums(hidden, weight, targets, chunk, share, ctx.needs_input_grad[:2])
        ctx.save_for_backward(hidden, weight, targets)
        ctx.settings, ctx.tokens, ctx.sums = (chunk, share), hidden.shape[0], sums
        nll = sums.nll / hidden.shape[0]
        ctx.mark_non_differentiable(sums.correct, nll)
        return sums.loss / hidden.shape[0], sums.correct, nll

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("the chunked cross-entropy", "F.cross_entropy on the logits")
        sums, ctx.sums = ctx.sums, None
        if sums is None:
            hidden, weight, targets = ctx.saved_tensors
            wanted, (chunk, share) = ctx.needs_input_grad[:2], ctx.settings
            sums = _sums(hidden, weight, targets, chunk, share, wanted)
        per_token = grads[0] / ctx.tokens
        by_hidden = None if sums.by_hidden is None else sums.by_hidden.mul_(per_token)
        by_weight = None
        if sums.by_weight is not None:
            by_weight = sums.by_weight.mul_(per_token).to(ctx.saved_tensors[1].dtype)
        return by_hidden, by_weight, None, None, None


def linear_cross_entropy(
    hidden: Float[Tensor, "n d"],
    weight: Float[Tensor, "v d"],
    targets: Int[Tensor, "n"],
    chunk: int = CHUNK,
    label_smoothing: float = 0.0,
) -> LinearCrossEntropy:
    """Mean cross-entropy of softmax(hidden · weightᵀ) against `targets`, and the hits.

    `label_smoothing` is the share ε of the target's weight that all V words get alike. Under
    autocast the products run in its dtype; loss and weight gradient gather in float32. Raises
    `InputError` for a chunk below 1 and a label smoothing outside 0 … 1.
    """
    _check_chunk(chunk)
    if not 0 <= label_smoothing <= 1:
        raise InputError(f"label_smoothing is {label_smoothing}; it must be from 0 to 1")
    if torch.is_autocast_enabled(hidden.device.type):
        hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
    with torch.autocast(hidden.device.type, enabled=False):
        if plain() and not torch.compiler.is_compiling():
            return _plainly(hidden, weight, targets, label_smoothing)
        if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
            return LinearCrossEntropy(
                *_LinearCrossEntropy.apply(hidden, weight, targets, chunk, label_smoothing)  # type: ignore[no-untyped-call]
            )
        scores = token_scores(hidden, weight, targets, chunk)
        nll = scores.loss.mean()
        smoothing = _Smoothing(weight, _wide(hidden), label_smoothing)
        loss = nll + smoothing.loss(hidden, weight, targets) / max(1, len(targets))
        return LinearCrossEntropy(loss, scores.correct.sum(), nll)


def _plainly(
    hidden: Tensor, weight: Tensor, targets: Tensor, label_smoothing: float
) -> LinearCrossEntropy:
    """The same by torch's own operations: every derivative, and the (N, V) logits whole."""
    logits = F.linear(hidden, weight.to(hidden.dtype)).to(_wide(hidden))
    loss = F.cross_entropy(logits, targets, label_smoothing=label_smoothing)
    nll = F.cross_entropy(logits.detach(), targets)
    return LinearCrossEntropy(loss, (logits.argmax(-1) == targets).sum(), nll)


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
