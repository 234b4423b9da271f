"""The causal language model: embedding, blocks, head."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from normattn.errors import InputError, require_sizes
from normattn.kernels.cross_entropy import (
    LinearCrossEntropy,
    TokenScores,
    linear_cross_entropy,
    token_scores,
)
from normattn.layers.documents import documents_from_ends
from normattn.models.cache import CHUNK, ModelCache
from normattn.models.config import CausalLMConfig
from normattn.models.generation import Answer, generate
from normattn.models.initialisation import initialise
from normattn.models.transformer import AttentionContext, TokenModel
from normattn.models.utils import MethodHandle, checked_ids, without_dropout
from normattn.plain import plain_operations
from normattn.score import Score, ScoreSpec

# Tokens scored at a time without gradients, which bounds the memory of activations.
_SCORED_TOKENS = 8192


class CausalLM(TokenModel):
    """A decoder that predicts token t + 1 from tokens 0 … t.

    `model(ids (B, T)) → logits (B, T, V)`. Blocks are an attention and a feed-forward sub-layer
    ("mha") or one gated attention unit ("gau"), each in the configured placement. The head is the
    embedding unless `tie_head` is off. Other properties are those of every `TokenModel`.
    """

    config_class = CausalLMConfig

    def __init__(self, config: CausalLMConfig) -> None:
        if not isinstance(config, CausalLMConfig):
            raise InputError(f"CausalLM takes a CausalLMConfig, not a {type(config).__name__}")
        super().__init__(config, config.vocab_size)
        self.config = config
        tied = config.tie_head
        self.head = None if tied else nn.Linear(config.dim, config.vocab_size, bias=False)
        initialise(self, config)
        self._method: MethodHandle | None = None

    @property
    def head_weight(self) -> Float[Tensor, "v d"]:
        """The matrix (V, dim) that turns a hidden vector into logits."""
        return self.embedding.weight if self.head is None else self.head.weight

    def forward(
        self,
        ids: Int[Tensor, "b t"],
        key_padding: Bool[Tensor, "b t"] | None = None,
        cache: ModelCache | None = None,
        backend: str = "auto",
    ) -> Float[Tensor, "b t v"]:
        """Logits for the token after each position; the arguments are as for `hidden`."""
        return F.linear(self.hidden(ids, key_padding, cache, backend), self.head_weight)

    def hidden(
        self,
        ids: Int[Tensor, "b t"],
        key_padding: Bool[Tensor, "b t"] | None = None,
        cache: ModelCache | None = None,
        backend: str = "auto",
    ) -> Float[Tensor, "b t d"]:
        """The last block's output after the final norm, which the head reads.

        `key_padding` is True where a token is padding; positions then count from each row's first
        real token, so left padding changes nothing. With a `cache` (`new_cache`) the ids continue
        the cached ones and are added to the cache; it works without gradients only.
        """
        checked_ids(ids)
        if cache is None:
            packed = self.config.score.documents
            documents = None if packed is None else documents_from_ends(ids == packed.separator)
            context = AttentionContext(key_padding, documents, backend=backend)
            return self.hidden_states(ids, context)
        if not isinstance(cache, ModelCache):
            raise InputError(f"a model's cache comes from new_cache(), but it is {cache!r}")
        context = replace(cache.extend(ids, key_padding), backend=backend)
        hidden = self.hidden_states(ids, context, cache.layers)
        cache.commit(ids.shape[1])
        return hidden

    def loss(self, ids: Int[Tensor, "b t1"], backend: str = "auto") -> LinearCrossEntropy:
        """Mean cross-entropy, in nats, of ids[:, 1:] given ids[:, :-1], and correct predictions.

        Only `backend` "reference" and torch.func store all (B, T, V) logits. Raises `InputError`
        below two tokens.
        """
        _num_targets(ids)
        hidden = self.hidden(ids[:, :-1], backend=backend).flatten(0, 1)
        with plain_operations(backend == "reference"):
            return linear_cross_entropy(hidden, self.head_weight, ids[:, 1:].flatten())

    @torch.no_grad()
    def token_scores(self, ids: Int[Tensor, "b t1"], first: int = 0) -> TokenScores:
        """Loss and correctness of the tokens ids[:, first + 1:], (B, T − first), no gradients.

        Dropout is off. Rows are processed in groups, and rows of more than 8192 tokens in chunks.
        So memory grows neither with the batch nor, except for keys and values, with the length. The
        head skips tokens before `first` (default 0: none). Raises `InputError` below two tokens and
        where no token follows `first`.
        """
        num_targets = _num_targets(ids)
        if not 0 <= first < num_targets:
            raise InputError(
                f"tokens from {first} on were asked for, but a row predicts {num_targets}"
            )
        rows = max(1, _SCORED_TOKENS // ids.shape[1])
        with without_dropout(self):
            scores = [self._score_rows(group, first) for group in torch.split(ids, rows)]
        loss, correct = (torch.cat(parts) for parts in zip(*scores, strict=True))
        return TokenScores(loss, correct)

    def _score_rows(self, ids: Tensor, first: int) -> TokenScores:
        """`token_scores` of some rows, or of one long row in chunks with a cache."""
        inputs, targets = ids[:, :-1], ids[:, 1:]
        if inputs.shape[1] > _SCORED_TOKENS:
            hidden_chunks = self._in_chunks(inputs, None, self.new_cache(), CHUNK)
        else:
            hidden_chunks = iter([self.hidden(inputs)])
        offset, losses, correct = 0, [], []
        for hidden in hidden_chunks:
            start, end = max(first, offset), offset + hidden.shape[1]
            if start < end:
                rows, scored = hidden[:, start - offset :].flatten(0, 1), targets[:, start:end]
                scores = token_scores(rows, self.head_weight, scored.flatten())
                losses.append(scores.loss.view(scored.shape))
                correct.append(scores.correct.view(scored.shape))
            offset = end
        return TokenScores(torch.cat(losses, 1), torch.cat(correct, 1))

    def new_cache(self, max_length: int | None = None) -> ModelCache:
        """An empty cache for the active scores; `max_length` allocates it at once and limits it."""
        return ModelCache(self.blocks.specs, max_length)

    @torch.no_grad()
    def prefill(
        self,
        ids: Int[Tensor, "b t"],
        key_padding: Bool[Tensor, "b t"] | None = None,
        cache: ModelCache | None = None,
        chunk: int = CHUNK,
    ) -> tuple[Float[Tensor, "b v"], ModelCache]:
        """Process `ids` in chunks of `chunk` tokens; return the last token's logits and the cache.

        Except for the cache, memory grows with `chunk`, not with the length. Dropout is off.
        `cache` is a new one unless given; padding must be on the left.
        """
        cache = self.new_cache() if cache is None else cache
        last = None
        with without_dropout(self):
            for hidden in self._in_chunks(ids, key_padding, cache, chunk):
                last = hidden[:, -1]
        if last is None:
            raise InputError("no token was given; a prompt needs at least one")
        return F.linear(last, self.head_weight), cache

    def _in_chunks(
        self, ids: Tensor, key_padding: Tensor | None, cache: ModelCache, chunk: int
    ) -> Iterator[Tensor]:
        require_sizes("prefill", chunk=chunk)
        for start in range(0, checked_ids(ids).shape[1], chunk):
            columns = slice(start, start + chunk)
            padding = None if key_padding is None else key_padding[:, columns]
            yield self.hidden(ids[:, columns], padding, cache)

    def generate(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, **settings: Any
    ) -> list[Answer]:
        """Continue each prompt; the settings are as for `normattn.models.generate`."""
        return generate(self, prompts, max_new_tokens, **settings)

    @property
    def spec(self) -> ScoreSpec:
        """The active score: the trained one, with a method if one is switched on."""
        if self._method is not None and self._method.active:
            return self._method.spec
        return self.config.score.resolve(train_length=self.config.train_length)

    def using(self, method: ScoreSpec | str, **parameters: Any) -> MethodHandle:
        """Switch an inference-time method on in every layer until the handle is removed.

        `method` is the name of a method, with parameters (`using("YaRN", factor=8)`), which is
        added to the trained score; or a `ScoreSpec` with the training-time components of this
        model. "unmodified" is the trained score. Raises `InputError` while another method is on,
        for training-time components that differ, and for parameters next to a `ScoreSpec`.
        """
        if self._method is not None and self._method.active:
            raise InputError(
                f"{self._method.spec.name} is already switched on in this model; "
                "remove it before switching on another method"
            )
        if isinstance(method, str):
            method = self.config.score.with_method(method, **parameters)
        elif not isinstance(method, ScoreSpec):
            raise InputError(f"a method is a name or a ScoreSpec, not {type(method).__name__}")
        elif parameters:
            names = ", ".join(parameters)
            raise InputError(f"a ScoreSpec holds its own parameters; {names} cannot be added")
        spec = method.resolve(train_length=self.config.train_length)
        scores = [module for module in self.modules() if isinstance(module, Score)]
        specs = [spec.layer(layer, self.config.layers) for layer in range(len(scores))]
        self._method = MethodHandle(scores, specs, spec)
        return self._method


def _num_targets(ids: Tensor) -> int:
    """The number of tokens that a row predicts; `InputError` if none."""
    if checked_ids(ids).shape[1] < 2:
        raise InputError(f"rows of {ids.shape[1]} tokens have nothing to predict; give at least 2")
    return ids.shape[1] - 1
