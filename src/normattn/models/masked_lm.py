"""The masked language model: a bidirectional encoder that predicts hidden tokens.

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
from normattn.models.initialisation import initialise
from normattn.models.transformer import AfterLayer, AttentionContext, TokenModel
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
    `key_padding` is True where a token is padding; `backend` is the kernel of every layer, as in
    `attention`, and with "reference" the whole model is plain operations.

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
        tied = config.tie_head
        self.head = None if tied else nn.Linear(config.dim, config.vocab_size, bias=False)
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
        """Logits for the token at each position."""
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

        `after(layer, x)` is called with the output of every layer, and as layer −1 what the first
        one reads.
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
        """Mean cross-entropy of the `targets` at `places`, in chunks; and hits.

        With `key_padding` a negative target is not counted, so that rows may have fewer than M.
        The value is the last layer's alone; the gradient also teaches the exits.
        """
        # Without padding every target counts, which needs no look at them.
        kept = slice(None) if key_padding is None else targets.flatten() >= 0
        wanted = targets.flatten()[kept]
        hidden, *below = self._ends(ids, places, key_padding, backend)
        with plain_operations(backend == "reference"):
            own = linear_cross_entropy(hidden.flatten(0, 1)[kept], self.head_weight, wanted)
            head = self.head_weight.detach()
            loss, hits = own.loss, [own.correct]
            for leave, x in zip(self.exits, below, strict=True):
                scored = linear_cross_entropy(leave(x.flatten(0, 1)[kept]), head, wanted)
                hits.append(scored.correct)
                loss = loss + EXIT_WEIGHT * (scored.loss - scored.loss.detach())
        counted = torch.full_like(own.correct, wanted.numel())
        return MaskedLoss(loss, own.correct, counted, torch.stack(hits)[1:])

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
        with without_dropout(self):
            hidden, *below = self._ends(ids, places, key_padding)
        ends = [hidden, *(leave(x) for leave, x in zip(self.exits, below, strict=True))]
        known, kept = targets.clamp_min(0).flatten(), targets >= 0
        scores = [token_scores(x.flatten(0, 1), self.head_weight, known) for x in ends]
        hits = torch.stack([score.correct.view(targets.shape) & kept for score in scores])
        return MaskedScores(scores[0].loss.view(targets.shape) * kept, hits[0], hits[1:])

    def _ends(
        self, ids: Tensor, places: Tensor, key_padding: Tensor | None, backend: str = "auto"
    ) -> list[Tensor]:
        """The hidden vectors (B, M, D) at `places`: the last layer's, then those of the exits."""
        if places.shape[0] != ids.shape[0]:
            raise InputError(f"{ids.shape[0]} rows were given with places in {places.shape[0]}")
        below: list[Tensor] = []

        def keep(layer: int, x: Tensor) -> None:
            if 0 <= layer < len(self.exits):
                # Only what is read of it goes on being held.
                below.append(torch.take_along_dim(x.detach(), places[..., None], 1))

        hidden = self.hidden(ids, key_padding, keep if self.exits else None, backend)
        return [torch.take_along_dim(hidden, places[..., None], 1), *below]
