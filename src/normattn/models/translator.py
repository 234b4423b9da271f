"""The encoder–decoder Transformer for translation."""

from __future__ import annotations

from dataclasses import dataclass

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
from normattn.models.cache import ModelCache
from normattn.models.config import TranslatorConfig
from normattn.models.initialisation import initialise
from normattn.models.transformer import AttentionContext, Blocks, make_outer_norms
from normattn.models.utils import checked_ids, embed, without_dropout
from normattn.plain import plain_operations


@dataclass(frozen=True)
class Encoded:
    """Encoded sources, for the decoder.

    `hidden` is the encoder's output, `padding` True where a token is padding (None: nowhere),
    `memories` the keys and values for the cross-attention of each decoder block.
    """

    hidden: Float[Tensor, "b s d"]
    padding: Bool[Tensor, "b s"] | None
    memories: tuple[Memory, ...]

    def choose(self, rows: Int[Tensor, " r"]) -> Encoded:
        """Source i becomes the old source rows[i]; sources may repeat or be left out."""
        padding = None if self.padding is None else self.padding[rows]
        memories = tuple(memory.choose(rows) for memory in self.memories)
        return Encoded(self.hidden[rows], padding, memories)


class Translator(nn.Module):
    """A bidirectional encoder of the source and a causal decoder of the target.

    `model(source (B, S), target (B, T)) → logits (B, T, V)` for the token after each of `target`,
    which begins with `bos_id`. `pad_id` pads sources on either side and targets on the right. A
    source usually ends in `eos_id`, which is not added here; an empty one raises `InputError`.
    Norms, `backend` and weights are as in `TokenModel`; dropout also acts on the embeddings. Only
    the scores encode positions. The head is the target's embedding unless `tie_head` is off.
    Source: arXiv 1706.03762.
    """

    config_class = TranslatorConfig

    def __init__(self, config: TranslatorConfig) -> None:
        super().__init__()
        self.config = config
        decoder, dim, target_size = config.decoder, config.dim, config.target_size
        shared, tied = config.shared_vocabulary, config.tie_head
        self.source_embedding = nn.Embedding(config.source_vocab, dim)
        self.target_embedding = None if shared else nn.Embedding(target_size, dim)
        self.source_norm, encoder_norm = make_outer_norms(config)
        self.target_norm, decoder_norm = make_outer_norms(config)
        self.encoder = Blocks(config)
        self.encoder_norm = encoder_norm
        self.decoder = Blocks(decoder, config.resolved_cross_score)
        self.decoder_norm = decoder_norm
        self.head = None if tied else nn.Linear(dim, target_size, bias=False)
        initialise(self, config)
        # Again with the gain of the decoder's own depth.
        initialise(self.decoder, decoder)

    @property
    def head_weight(self) -> Float[Tensor, "v d"]:
        """The matrix (V, D) that turns a hidden vector into logits."""
        return (self.head or self.target_embedding or self.source_embedding).weight

    def forward(
        self, source: Int[Tensor, "b s"], target: Int[Tensor, "b t"], backend: str = "auto"
    ) -> Float[Tensor, "b t v"]:
        """Logits for the token after each position of the target."""
        hidden = self.decode(target, self.encode(source, backend), backend=backend)
        return F.linear(hidden, self.head_weight)

    def encode(self, source: Int[Tensor, "b s"], backend: str = "auto") -> Encoded:
        """Encode sources, for any number of targets."""
        padding = checked_ids(source, "source") == self.config.pad_id
        if bool(padding.all(-1).any()):
            raise InputError("a source has no tokens: give each at least one, for example eos_id")
        positions = torch.arange(source.shape[1], device=source.device)
        key_padding = None
        if bool(padding.any()):
            key_padding, positions = padding, ((~padding).cumsum(-1) - 1).clamp(min=0)
        with plain_operations(backend == "reference"):
            x = self._embed(self.source_embedding, self.source_norm, source)
            x = self.encoder(x, AttentionContext(key_padding, causal=False, backend=backend))
            x = x if self.encoder_norm is None else self.encoder_norm(x)
            return Encoded(x, key_padding, self.decoder.remember(x, key_padding, positions))

    def decode(
        self,
        target: Int[Tensor, "br t"],
        encoded: Encoded,
        cache: ModelCache | None = None,
        backend: str = "auto",
    ) -> Float[Tensor, "br t d"]:
        """The last block's output after the final norm, which the head reads.

        Each source may have r consecutive rows of target. With a `cache` (`new_cache`) the target
        continues the cached tokens and is added to the cache; this is for inference.
        """
        checked_ids(target, "target")
        first, caches, padding = 0, None, None
        if cache is None:
            padding = target == self.config.pad_id
        else:
            first, caches = cache.length, cache.layers
            cache.extend(target)
        context = AttentionContext(backend=backend, query_padding=padding)
        positions = torch.arange(first, first + target.shape[1], device=target.device)
        with plain_operations(backend == "reference"):
            table = self.target_embedding or self.source_embedding
            x = self._embed(table, self.target_norm, target)
            x = self.decoder(x, context, caches, memories=encoded.memories, positions=positions)
            if cache is not None:
                cache.commit(target.shape[1])
            hidden: Tensor = x if self.decoder_norm is None else self.decoder_norm(x)
            return hidden

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
        """Mean cross-entropy of target[:, 1:] given target[:, :-1] and the source.

        Padding is ignored. Only `backend` "reference" and torch.func store all (tokens, V) logits.
        Raises `InputError` where there is only padding.
        """
        hidden, next_tokens, valid = self._hidden_and_targets(source, target, backend)
        with plain_operations(backend == "reference"):
            return linear_cross_entropy(
                hidden[valid], self.head_weight, next_tokens[valid], label_smoothing=label_smoothing
            )

    @torch.no_grad()
    def token_scores(self, source: Int[Tensor, "b s"], target: Int[Tensor, "b t1"]) -> TokenScores:
        """Loss and correctness of target[:, 1:], (B, T), dropout off; 0 and False for padding."""
        with without_dropout(self):
            hidden, next_tokens, valid = self._hidden_and_targets(source, target)
        scores = token_scores(hidden[valid], self.head_weight, next_tokens[valid])
        loss = scores.loss.new_zeros(valid.shape).masked_scatter_(valid, scores.loss)
        correct = torch.zeros_like(valid).masked_scatter_(valid, scores.correct)
        return TokenScores(loss, correct)

    def _hidden_and_targets(
        self, source: Tensor, target: Tensor, backend: str = "auto"
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden vectors (B, T, D), the next tokens, and which of them are not padding."""
        next_tokens = target[:, 1:]
        valid = next_tokens != self.config.pad_id
        encoded = self.encode(source, backend)
        return self.decode(target[:, :-1], encoded, backend=backend), next_tokens, valid

    def _embed(self, table: nn.Embedding, norm: nn.Module | None, ids: Tensor) -> Tensor:
        x = embed(table, norm, ids)
        return F.dropout(x, self.config.dropout, self.training) if self.config.dropout else x
