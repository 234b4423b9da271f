"""The encoder–decoder Transformer: it reads a source and writes a target.

Legend: B pairs, S source tokens, T target tokens, D width, V target vocabulary, r rows of targets
for each source.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from normattn.errors import InputError
from normattn.kernels.cross_entropy import (
    LinearCrossEntropy,
    TokenScores,
    linear_cross_entropy,
    token_scores,
)
from normattn.layers.cross_attention import Memory
from normattn.models.beam_search import Hypothesis, beam_search
from normattn.models.cache import ModelCache
from normattn.models.config import TranslatorConfig
from normattn.models.initialisation import initialise
from normattn.models.transformer import AttentionContext, Blocks, first_norm, last_norm
from normattn.models.utils import checked_ids, embed, without_dropout
from normattn.plain import plain_operations


@dataclass(frozen=True)
class Encoded:
    """Sources as the decoder reads them.

    `hidden` is the encoder's output, `padding` True where a token is padding (None: nowhere),
    `memories` the keys and values of each decoder block's cross attention.
    """

    hidden: Float[Tensor, "b s d"]
    padding: Bool[Tensor, "b s"] | None
    memories: tuple[Memory, ...]

    def choose(self, rows: Int[Tensor, " r"]) -> Encoded:
        """Source i becomes the old source rows[i]; sources may repeat or lack."""
        padding = None if self.padding is None else self.padding[rows]
        memories = tuple(memory.choose(rows) for memory in self.memories)
        return Encoded(self.hidden[rows], padding, memories)


class Translator(nn.Module):
    """An encoder that reads the source both ways, a decoder that predicts the target in turn.

    `model(source (B, S), target (B, T)) → logits (B, T, V)` for the token after each of `target`,
    which begins with `bos_id`. Rows are filled up with `pad_id`: sources anywhere but within,
    targets on the right. A source usually ends in `eos_id`; it is read as it is given. Norms
    before and after each stack are as in `CausalLM`; dropout also acts on the embeddings. Words
    have no position but those of the scores. The head is the target's embedding unless `tie_head`
    is off. `backend` is the kernel of every layer, as in `attention`; with "reference" the whole
    model is plain operations. Weights are drawn from torch's global generator (`initialise`).
    Raises `InputError` for ids outside the vocabulary (on CPU) and for a row of source without a
    token. Source: arXiv 1706.03762.
    """

    config_class = TranslatorConfig

    def __init__(self, config: TranslatorConfig) -> None:
        super().__init__()
        self.config = config
        below, dim, size = config.decoder, config.dim, config.target_size
        shared, tied = config.shared_vocabulary, config.tie_head
        self.source_embedding = nn.Embedding(config.source_vocab, dim)
        self.target_embedding = None if shared else nn.Embedding(size, dim)
        self.source_norm, self.target_norm = first_norm(config), first_norm(config)
        self.encoder = Blocks(config)
        self.encoder_norm = last_norm(config)
        self.decoder = Blocks(below, config.across)
        self.decoder_norm = last_norm(config)
        self.head = None if tied else nn.Linear(dim, size, bias=False)
        # The decoder once more, by its own depth.
        initialise(self, config)
        initialise(self.decoder, below)

    @property
    def head_weight(self) -> Float[Tensor, "v d"]:
        """The matrix (V, D) that turns a hidden vector into logits."""
        return self._targets.weight if self.head is None else self.head.weight

    def forward(
        self, source: Int[Tensor, "b s"], target: Int[Tensor, "b t"], backend: str = "auto"
    ) -> Float[Tensor, "b t v"]:
        """Logits for the token after each position of the target."""
        hidden = self.decode(target, self.encode(source, backend), backend=backend)
        return F.linear(hidden, self.head_weight)

    def encode(self, source: Int[Tensor, "b s"], backend: str = "auto") -> Encoded:
        """Read sources once, for any number of targets."""
        padding = checked_ids(source, "source") == self.config.pad_id
        if bool(padding.all(-1).any()):
            raise InputError("a source has no tokens: give each at least one, for example eos_id")
        positions = torch.arange(source.shape[1], device=source.device)
        known = None
        if bool(padding.any()):
            known, positions = padding, ((~padding).cumsum(-1) - 1).clamp(min=0)
        with plain_operations(backend == "reference"):
            x = self._embed(self.source_embedding, self.source_norm, source)
            x = self.encoder(x, AttentionContext(known, causal=False, backend=backend))
            x = x if self.encoder_norm is None else self.encoder_norm(x)
            return Encoded(x, known, self.decoder.remember(x, known, positions))

    def decode(
        self,
        target: Int[Tensor, "br t"],
        encoded: Encoded,
        cache: ModelCache | None = None,
        backend: str = "auto",
    ) -> Float[Tensor, "br t d"]:
        """The last block's output after the final norm, which the head reads.

        There may be r rows of target for each source, one after another. With a `cache`
        (`new_cache`) the target goes on from what it holds, and joins it; that is for inference.
        """
        checked_ids(target, "target")
        first, caches, padding = 0, None, None
        if cache is None:
            padding = target == self.config.pad_id
        else:
            first, caches = cache.length, cache.layers
            cache.read(target)
        context = AttentionContext(backend=backend, query_padding=padding)
        positions = torch.arange(first, first + target.shape[1], device=target.device)
        with plain_operations(backend == "reference"):
            x = self._embed(self._targets, self.target_norm, target)
            x = self.decoder(x, context, caches, memories=encoded.memories, positions=positions)
            if cache is not None:
                cache.done(target.shape[1])
            last: Tensor = x if self.decoder_norm is None else self.decoder_norm(x)
            return last

    def new_cache(self, max_length: int | None = None) -> ModelCache:
        """An empty cache of the decoder's self-attention; see `CausalLM.new_cache`."""
        return ModelCache(self.decoder.specs, max_length)

    def loss(
        self,
        source: Int[Tensor, "b s"],
        target: Int[Tensor, "b t1"],
        label_smoothing: float = 0.0,
        *,
        backend: str = "auto",
    ) -> LinearCrossEntropy:
        """Mean cross-entropy of target[:, 1:] given target[:, :-1] and the source; and hits.

        Padding is no target. The (tokens, V) logits are never held whole, but with `backend`
        "reference".
        """
        hidden, wanted, kept = self._predictions(source, target, backend)
        with plain_operations(backend == "reference"):
            return linear_cross_entropy(
                hidden[kept], self.head_weight, wanted[kept], label_smoothing=label_smoothing
            )

    @torch.no_grad()
    def token_scores(self, source: Int[Tensor, "b s"], target: Int[Tensor, "b t1"]) -> TokenScores:
        """Loss and correctness of every token of target[:, 1:], (B, T); 0 and False for padding.

        Dropout is off while it runs.
        """
        with without_dropout(self):
            hidden, wanted, kept = self._predictions(source, target)
        scores = token_scores(hidden[kept], self.head_weight, wanted[kept])
        loss = scores.loss.new_zeros(kept.shape).masked_scatter_(kept, scores.loss)
        correct = torch.zeros_like(kept).masked_scatter_(kept, scores.correct)
        return TokenScores(loss, correct)

    def translate(self, sources: Sequence[Sequence[int]], **settings: Any) -> list[Hypothesis]:
        """The best `Hypothesis` for each source; settings are those of `beam_search`."""
        return [hypotheses[0] for hypotheses in beam_search(self, sources, **settings)]

    @property
    def _targets(self) -> nn.Embedding:
        return self.source_embedding if self.target_embedding is None else self.target_embedding

    def _predictions(
        self, source: Tensor, target: Tensor, backend: str = "auto"
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden vectors (B, T, D), the tokens that they should predict, and which are real."""
        if target.shape[1] < 2:
            raise InputError(
                f"targets of {target.shape[1]} tokens have nothing to predict; give bos … eos"
            )
        wanted = target[:, 1:]
        kept = wanted != self.config.pad_id
        if not bool(kept.any()):
            raise InputError("the targets contain only padding")
        encoded = self.encode(source, backend)
        return self.decode(target[:, :-1], encoded, backend=backend), wanted, kept

    def _embed(self, table: nn.Embedding, norm: nn.Module | None, ids: Tensor) -> Tensor:
        x = embed(table, norm, ids, f"this vocabulary is 0 to {table.num_embeddings - 1}")
        return F.dropout(x, self.config.dropout, self.training) if self.config.dropout else x
