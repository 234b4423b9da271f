"""The masked language model: a bidirectional encoder that is asked for hidden tokens.

Legend: B batch, T tokens, D width, V vocabulary, M chosen tokens of a row, N layers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from normattn.errors import InputError
from normattn.kernels.cross_entropy import linear_cross_entropy, token_scores
from normattn.layers.norms import LayerNorm
from normattn.models.config import MaskedLMConfig
from normattn.models.transformer import AfterLayer, AttentionContext, TokenModel, initialise
from normattn.models.utils import without_dropout
from normattn.plain import plain_operations

# Adam and Tiger do not see the scale of a loss; the norm that gradients are clipped by does, and
# this keeps what the exits add to it out of the stack's own clipping.
EXIT_WEIGHT = 1e-2


class MaskedLoss(NamedTuple):
    """Mean loss in nats over the chosen tokens (differentiable), hits, and tokens counted.

    `exit_correct` (N − 1,) counts the hits of the exits, bottom first; it is empty without exits.
    """

    loss: Float[Tensor, ""]
    correct: Int[Tensor, ""]
    tokens: Int[Tensor, ""]
    exit_correct: Int[Tensor, " n_1"]


class MaskedScores(NamedTuple):
    """Loss in nats and hit of every chosen token, and the hits of the exits below, bottom first."""

    loss: Float[Tensor, "b m"]
    correct: Bool[Tensor, "b m"]
    exit_correct: Bool[Tensor, "n_1 b m"]


class Exit(nn.Module):
    """What the shared head reads of a layer below the last: W · LayerNorm(x), W = 1 at the start.

    Shapes: (…, D) → (…, D). W (D, D) and the norm's gain and bias are the exit's own.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = LayerNorm(dim)
        self.linear = nn.Linear(dim, dim, bias=False)
        nn.init.eye_(self.linear.weight)

    def forward(self, x: Float[Tensor, "... d"]) -> Float[Tensor, "... d"]:
        """The vector for the head."""
        y: Tensor = self.linear(self.norm(x))
        return y


class MaskedLM(TokenModel):
    """An encoder that predicts the chosen tokens of a text in which some are hidden (BERT).

    `model(ids (B, T)) → logits (B, T, V)`; ids run to `vocab_size`, which is the mask. Every token
    sees every other. The head is the embedding, without the mask's row, unless `tie_head` is off.

    With `exits` the hidden vectors of each layer below the last are read by an `Exit` and the
    shared head, so that reading may stop there (FastBERT, arXiv 2004.02178). An exit learns
    from a detached copy of them and of the head: the stack is trained exactly as without exits, and
    no gradient enters it from the middle, where summed scores could not be undone.

    Weights are drawn from torch's global generator, the same with and without exits. Raises
    `InputError` for ids outside the vocabulary (on CPU). Source: arXiv 1810.04805.
    """

    config_class = MaskedLMConfig

    def __init__(self, config: MaskedLMConfig) -> None:
        super().__init__(config, config.vocab_size + 1)
        self.config = config
        self.head = (
            None if config.tie_head else nn.Linear(config.dim, config.vocab_size, bias=False)
        )
        initialise(self, config)
        count = config.layers - 1 if config.exits else 0
        self.exits = nn.ModuleList(Exit(config.dim) for _ in range(count))

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
        """Logits for the token at each position; `backend` as in `hidden`."""
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

        `key_padding` is True where a token is padding. `after(layer, x)` is called with the output
        of every layer, and as layer −1 what the first one reads. `backend` is the kernel of every
        layer, as in `attention`; with "reference" the whole model is plain operations.
        """
        vocabulary = (
            f"this model's vocabulary is 0 to {self.config.vocab_size - 1}, and "
            f"{self.config.mask_id} is the mask"
        )
        context = AttentionContext(key_padding, causal=False, backend=backend)
        return self.read(ids, context, after=after, vocabulary=vocabulary)

    def loss(
        self,
        ids: Int[Tensor, "b t"],
        places: Int[Tensor, "b m"],
        targets: Int[Tensor, "b m"],
        key_padding: Bool[Tensor, "b t"] | None = None,
        *,
        backend: str = "auto",
    ) -> MaskedLoss:
        """Mean cross-entropy of the `targets` that stood at `places`, in chunks; and hits.

        With `key_padding` a negative target is not counted, so that rows may have fewer than M.
        The value is the last layer's alone; the gradient also teaches the exits. `backend` as in
        `hidden`.
        """
        below: list[Tensor] = []
        hidden = self._read(ids, places, key_padding, below, detach=True, backend=backend)
        with plain_operations(backend == "reference"):
            # Without padding every target counts, which needs no look at them.
            kept = None if key_padding is None else targets >= 0
            wanted = _rows(targets, kept)
            own = linear_cross_entropy(_rows(hidden, kept), self.head_weight, wanted)
            head = self.head_weight.detach()
            loss, hits = own.loss, []
            for leave, x in zip(self.exits, below, strict=True):
                scored = linear_cross_entropy(leave(_rows(x, kept)), head, wanted)
                hits.append(scored.correct)
                loss = loss + EXIT_WEIGHT * (scored.loss - scored.loss.detach())
            counted = torch.full_like(own.correct, wanted.numel())
            return MaskedLoss(loss, own.correct, counted, _stacked(hits, own.correct))

    @torch.no_grad()
    def token_scores(
        self,
        ids: Int[Tensor, "b t"],
        places: Int[Tensor, "b m"],
        targets: Int[Tensor, "b m"],
        key_padding: Bool[Tensor, "b t"] | None = None,
    ) -> MaskedScores:
        """Loss and hits of every chosen token, at the end and at every exit, without gradients.

        Dropout is off while it runs. A negative target is not looked up: its loss is 0 and it is
        no hit.
        """
        below: list[Tensor] = []
        with without_dropout(self):
            hidden = self._read(ids, places, key_padding, below, detach=False)
        known = targets.clamp_min(0).flatten()
        kept = targets >= 0
        ends = [hidden, *(leave(x) for leave, x in zip(self.exits, below, strict=True))]
        scores = [token_scores(x.flatten(0, 1), self.head_weight, known) for x in ends]
        hits = [score.correct.view(targets.shape) & kept for score in scores]
        loss = scores[0].loss.view(targets.shape) * kept
        return MaskedScores(loss, hits[0], _stacked(hits[1:], hits[0]))

    def _read(
        self,
        ids: Tensor,
        places: Tensor,
        key_padding: Tensor | None,
        below: list[Tensor],
        detach: bool,
        backend: str = "auto",
    ) -> Tensor:
        """The hidden vectors (B, M, D) at `places`; those below the last layer join `below`."""
        if places.shape[0] != ids.shape[0]:
            raise InputError(f"{ids.shape[0]} rows were given with places in {places.shape[0]}")
        index = places[..., None]

        def keep(layer: int, x: Tensor) -> None:
            if 0 <= layer < len(self.exits):
                below.append(torch.take_along_dim(x.detach() if detach else x, index, 1))

        after = keep if self.exits else None
        hidden = self.hidden(ids, key_padding, after, backend)
        return torch.take_along_dim(hidden, index, 1)


def _rows(values: Tensor, kept: Tensor | None) -> Tensor:
    """The values of all chosen tokens, or of the `kept` ones, as one list."""
    return values.flatten(0, 1) if kept is None else values[kept]


def _stacked(tensors: list[Tensor], like: Tensor) -> Tensor:
    return torch.stack(tensors) if tensors else like.new_zeros((0, *like.shape))
