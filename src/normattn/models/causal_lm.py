"""The causal language model: embedding, blocks, head."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
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
from normattn.layers.documents import documents_from_ends
from normattn.models.cache import CHUNK, ModelCache
from normattn.models.config import CausalLMConfig
from normattn.models.generation import Answer, generate
from normattn.models.initialisation import initialise
from normattn.models.transformer import AttentionContext, TokenModel
from normattn.models.utils import MethodHandle, checked_ids, without_dropout
from normattn.plain import plain_operations
from normattn.score import Score, ScoreSpec

# Tokens scored at a time without gradient: the activations of about this many are held.
_SCORED_TOKENS = 8192
# Unwanted tokens are skipped in multiples of this many rows, so that a matrix product rounds each
# remaining row as it would among all of them.
_LEFT_OUT = 64


class CausalLM(TokenModel):
    """A decoder that predicts token t + 1 from tokens 0 … t.

    `model(ids (B, T)) → logits (B, T, V)`. Blocks are an attention and a feed-forward sub-layer
    ("mha") or one gated attention unit ("gau"), each in the configured placement (`TokenModel`).
    The head is the embedding unless `tie_head` is off. `backend` is the kernel of every layer, as
    in `attention`: with "reference" the whole model is plain operations, for any derivative and
    torch.func. Weights are drawn from torch's global generator (`initialise`). Raises `InputError`
    for token ids outside the vocabulary (on CPU) and for settings that cannot be.
    """

    config_class = CausalLMConfig

    def __init__(self, config: CausalLMConfig) -> None:
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
        """Logits for the token after each position; arguments as of `hidden`."""
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
        those that it holds, and are added to it; it is for inference, without gradients.
        """
        checked_ids(ids)
        if cache is None:
            documents = None
            if (packed := self.config.score.documents) is not None:
                documents = documents_from_ends(ids == packed.separator)
            context = AttentionContext(key_padding, None, documents, backend=backend)
            return self.read(ids, context)
        context = replace(cache.read(ids, key_padding), backend=backend)
        hidden = self.read(ids, context, cache.layers)
        cache.done(ids.shape[1])
        return hidden

    def loss(self, ids: Int[Tensor, "b t1"], backend: str = "auto") -> LinearCrossEntropy:
        """Mean cross-entropy, in nats, of ids[:, 1:] given ids[:, :-1], in chunks; and hits.

        The (B, T, V) logits are never stored at once, except with `backend` "reference". Raises
        `InputError` below two tokens.
        """
        _check_two(ids)
        hidden = self.hidden(ids[:, :-1], backend=backend).flatten(0, 1)
        with plain_operations(backend == "reference"):
            return linear_cross_entropy(hidden, self.head_weight, ids[:, 1:].flatten())

    @torch.no_grad()
    def token_scores(self, ids: Int[Tensor, "b t1"], first: int = 0) -> TokenScores:
        """Loss and correctness of the tokens ids[:, first + 1:], (B, T − first), no gradients.

        Dropout is off while it runs. Rows are processed in groups, and rows of more than 8192
        tokens in chunks. So memory grows neither with the batch nor, except for keys and values,
        with the length. The head skips tokens before `first` (default 0: every token) where
        possible. Raises `InputError` below two tokens and where no token follows `first`.
        """
        tokens = _check_two(ids)
        if not 0 <= first < tokens:
            raise InputError(f"tokens from {first} on were asked for, but a row predicts {tokens}")
        rows = max(1, _SCORED_TOKENS // ids.shape[1])
        with without_dropout(self):
            scores = [self._scores(group, first) for group in torch.split(ids, rows)]
        loss, correct = (torch.cat(parts) for parts in zip(*scores, strict=True))
        return TokenScores(loss, correct)

    def _scores(self, ids: Tensor, first: int) -> TokenScores:
        """The scores of some rows, or of one long row read with a cache."""
        read, targets = ids[:, :-1], ids[:, 1:]
        tokens = targets.shape[1]
        if tokens > _SCORED_TOKENS:
            chunks, step = self._in_chunks(read, None, self.new_cache(), CHUNK), CHUNK
        else:
            even = ids.device.type == "cpu" and tokens % _LEFT_OUT == 0
            chunks, step = iter([self.hidden(read)]), _LEFT_OUT if even else tokens
        start, done = first // step * step, 0
        losses, hits = [], []
        for hidden in chunks:
            end, skipped = done + hidden.shape[1], max(0, start - done)
            if done + skipped < end:
                wanted = targets[:, done + skipped : end]
                scored = token_scores(
                    hidden[:, skipped:].flatten(0, 1), self.head_weight, wanted.flatten()
                )
                losses.append(scored.loss.view(wanted.shape))
                hits.append(scored.correct.view(wanted.shape))
            done = end
        return TokenScores(
            torch.cat(losses, 1)[:, first - start :], torch.cat(hits, 1)[:, first - start :]
        )

    def new_cache(self, max_length: int | None = None) -> ModelCache:
        """An empty cache for the scores that are active now.

        It grows. With `max_length` it allocates room for that many tokens at once and refuses more.
        """
        return ModelCache(self.blocks.specs, max_length)

    @torch.no_grad()
    def prefill(
        self,
        ids: Int[Tensor, "b t"],
        key_padding: Bool[Tensor, "b t"] | None = None,
        cache: ModelCache | None = None,
        chunk: int = CHUNK,
    ) -> tuple[Float[Tensor, "b v"], ModelCache]:
        """Process `ids`, `chunk` tokens at a time: the logits after the last one, and the cache.

        Except for the cache, memory grows with `chunk`, not with the length. Dropout is off while
        it runs. `cache` is a new one unless given; padding must be on the left.
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
        """The hidden vectors of `chunk` tokens after another."""
        if not isinstance(chunk, int) or chunk < 1:
            raise InputError(f"chunk is {chunk}; it must be a whole number of at least 1")
        for start in range(0, checked_ids(ids).shape[1], chunk):
            part = slice(start, start + chunk)
            padding = None if key_padding is None else key_padding[:, part]
            yield self.hidden(ids[:, part], padding, cache)

    def generate(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, **settings: Any
    ) -> list[Answer]:
        """The `Answer` to each prompt; settings are those of `normattn.models.generate`."""
        return generate(self, prompts, max_new_tokens, **settings)

    @property
    def spec(self) -> ScoreSpec:
        """The score that is active now: the trained one, or that with a method switched on."""
        if self._method is not None and self._method.active:
            return self._method.spec
        return self.config.score.resolve(train_length=self.config.train_length)

    def using(self, method: ScoreSpec | str, **parameters: Any) -> MethodHandle:
        """Switch an inference-time method on in every layer until the handle is removed.

        `method` is a method's text with its parameters (`using("YaRN", factor=8)`), added to the
        trained score, or a whole `ScoreSpec` with the training-time components of this model.
        "unmodified" is the trained score itself. Raises `InputError` while another method is on,
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


def _check_two(ids: Tensor) -> int:
    """How many tokens a row predicts; `InputError` where it is none."""
    if checked_ids(ids).shape[1] < 2:
        raise InputError(f"rows of {ids.shape[1]} tokens have nothing to predict; give at least 2")
    return ids.shape[1] - 1
