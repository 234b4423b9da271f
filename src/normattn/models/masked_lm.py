"""The masked language model: a bidirectional encoder that predicts masked tokens."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from normattn.errors import InputError
from normattn.kernels.cross_entropy import linear_cross_entropy, token_scores
from normattn.kernels.numerics import host_can_read
from normattn.layers.checks import check_tensor
from normattn.layers.norms import LayerNorm
from normattn.models.config import MaskedLMConfig
from normattn.models.initialisation import initialise
from normattn.models.transformer import AfterLayer, AttentionContext, TokenModel
from normattn.models.utils import checked_ids, without_dropout
from normattn.plain import plain_operations

# Small, so that the gradients of exits hardly change the norm for gradient clipping. Adam and Tiger
# do not depend on the scale of a loss.
EXIT_WEIGHT = 1e-2


class MaskedLoss(NamedTuple):
    """Mean loss in nats over the targets (differentiable), correct predictions, and targets.

    `exit_correct` (N − 1,) has correct predictions of the exits, bottom first; empty without exits.
    """

    loss: Float[Tensor, ""]
    correct: Int[Tensor, ""]
    tokens: Int[Tensor, ""]
    exit_correct: Int[Tensor, " n_1"]


class MaskedScores(NamedTuple):
    """Loss in nats and correctness of each target; correctness at the exits, bottom first."""

    loss: Float[Tensor, "b m"]
    correct: Bool[Tensor, "b m"]
    exit_correct: Bool[Tensor, "n_1 b m"]


class MaskedLM(TokenModel):
    """A bidirectional encoder that predicts masked tokens (BERT).

    `model(ids (B, T)) → logits (B, T, V)`; the id `vocab_size` is the mask. The head is the
    embedding, without the mask's row, unless `tie_head` is off. `key_padding` is True where a token
    is padding. Source: arXiv 1810.04805.

    With `exits` each layer below the last has an exit, W · LayerNorm(x) with W = 1 at first, to the
    shared head, where inference may stop (FastBERT, arXiv 2004.02178). Exits learn from detached
    hidden vectors and a detached head, so the stack is trained exactly as without them.
    """

    config_class = MaskedLMConfig

    def __init__(self, config: MaskedLMConfig) -> None:
        super().__init__(config, config.vocab_size + 1)
        self.config = config
        tied = config.tie_head
        self.head = None if tied else nn.Linear(config.dim, config.vocab_size, bias=False)
        initialise(self, config)
        self.exits = nn.ModuleList()
        for _ in range(config.layers - 1 if config.exits else 0):
            linear = nn.Linear(config.dim, config.dim, bias=False)
            nn.init.eye_(linear.weight)
            norm = LayerNorm(config.dim)
            self.exits.append(nn.Sequential(OrderedDict(norm=norm, linear=linear)))

    @property
    def head_weight(self) -> Float[Tensor, "v d"]:
        """The matrix (V, D) that turns a hidden vector into logits."""
        if self.head is not None:
            return self.head.weight
        return self.embedding.weight[: self.config.vocab_size]

    def forward(
        self,
        ids: Int[Tensor, "b t"],
        key_padding: Bool[Tensor, "b t"] | None = None,
        backend: str = "auto",
    ) -> Float[Tensor, "b t v"]:
        """Logits of the token at each position."""
        hidden = self.hidden(ids, key_padding, backend=backend)
        return F.linear(hidden, self.head_weight)

    def hidden(
        self,
        ids: Int[Tensor, "b t"],
        key_padding: Bool[Tensor, "b t"] | None = None,
        after: AfterLayer | None = None,
        backend: str = "auto",
    ) -> Float[Tensor, "b t d"]:
        """The last layer's output after the final norm, which the head reads.

        `after(layer, x)` gets the output of each layer, and for layer −1 the input of the first.
        """
        context = AttentionContext(key_padding, causal=False, backend=backend)
        return self.hidden_states(ids, context, after=after)

    def loss(
        self,
        ids: Int[Tensor, "b t"],
        places: Int[Tensor, "b m"],
        targets: Int[Tensor, "b m"],
        key_padding: Bool[Tensor, "b t"] | None = None,
        *,
        backend: str = "auto",
    ) -> MaskedLoss:
        """Mean cross-entropy of the `targets` at the positions `places`, and correct predictions.

        With `key_padding` a negative target is ignored: rows may have fewer than M. The value is
        the last layer's, but the gradient also trains the exits.
        """
        # Without padding every target counts: no need to read them.
        padded = key_padding is not None
        expected = targets.clamp_min(0) if padded else targets
        self._check_targets(ids, places, expected)
        hidden, *exit_hidden = self._hidden_at(ids, places.long(), key_padding, backend)
        valid = targets.flatten() >= 0 if padded else slice(None)
        labels = targets.flatten()[valid]
        with plain_operations(backend == "reference"):
            last = linear_cross_entropy(hidden.flatten(0, 1)[valid], self.head_weight, labels)
            head = self.head_weight.detach()
            loss, correct = last.loss, [last.correct]
            for exit_, x in zip(self.exits, exit_hidden, strict=True):
                scores = linear_cross_entropy(exit_(x.flatten(0, 1)[valid]), head, labels)
                correct.append(scores.correct)
                # Adds a gradient but no value.
                loss = loss + EXIT_WEIGHT * (scores.loss - scores.loss.detach())
        num_targets = torch.full_like(last.correct, labels.numel())
        return MaskedLoss(loss, last.correct, num_targets, torch.stack(correct)[1:])

    @torch.no_grad()
    def token_scores(
        self,
        ids: Int[Tensor, "b t"],
        places: Int[Tensor, "b m"],
        targets: Int[Tensor, "b m"],
        key_padding: Bool[Tensor, "b t"] | None = None,
    ) -> MaskedScores:
        """Loss and correctness of each target, at the last layer and the exits; no gradients.

        Dropout is off. A negative target has loss 0 and is not correct.
        """
        expected, valid = targets.clamp_min(0), targets >= 0
        self._check_targets(ids, places, expected)
        with without_dropout(self):
            hidden, *exit_hidden = self._hidden_at(ids, places.long(), key_padding)
        exits = (exit_(x) for exit_, x in zip(self.exits, exit_hidden, strict=True))
        scores = [
            token_scores(x.flatten(0, 1), self.head_weight, expected.flatten())
            for x in (hidden, *exits)
        ]
        correct = torch.stack([score.correct.view(targets.shape) & valid for score in scores])
        return MaskedScores(scores[0].loss.view(targets.shape) * valid, correct[0], correct[1:])

    def _check_targets(self, ids: Tensor, places: Tensor, targets: Tensor) -> None:
        """Check that places lie in the text, and targets in the vocabulary."""
        rows, length = checked_ids(ids).shape
        check_tensor("places", places, "int64 or int32", (rows, *places.shape[1:2]))
        check_tensor("targets", targets, "int64 or int32", tuple(places.shape))
        # `take_along_dim` would read beyond the row.
        for name, x, end in (("places", places, length), ("targets", targets, self.config.mask_id)):
            if host_can_read(x) and bool(((x < 0) | (x >= end)).any()):
                raise InputError(
                    f"{name} run from {int(x.min())} to {int(x.max())}; expected 0 to {end - 1}"
                )

    def _hidden_at(
        self, ids: Tensor, places: Tensor, key_padding: Tensor | None, backend: str = "auto"
    ) -> list[Tensor]:
        """The hidden vectors (B, M, D) at `places`: of the last layer, then of those with exits."""
        exit_hidden: list[Tensor] = []

        def collect(layer: int, x: Tensor) -> None:
            if 0 <= layer < len(self.exits):
                exit_hidden.append(torch.take_along_dim(x.detach(), places[..., None], 1))

        hidden = self.hidden(ids, key_padding, collect if self.exits else None, backend)
        return [torch.take_along_dim(hidden, places[..., None], 1), *exit_hidden]
