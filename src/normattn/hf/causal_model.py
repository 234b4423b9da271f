"""`CausalLM` as a causal language model of transformers."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F
from transformers.modeling_outputs import CausalLMOutputWithPast

from normattn.errors import InputError
from normattn.hf.base_model import NormattnModel, as_asked, checked_ids, padding_of, refuse_inner
from normattn.hf.configuration import NormattnConfig
from normattn.hf.generation_cache import NormattnCache
from normattn.models.causal_lm import CausalLM

# Half typed by transformers: taken as Any.
_GenerationMixin: Any = transformers.GenerationMixin


class NormattnForCausalLM(NormattnModel, _GenerationMixin):
    """Token t + 1 from tokens 0 … t; `generate` with greedy search, sampling and beams."""

    config_class = NormattnConfig
    model_class = CausalLM

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        labels: Int[Tensor, "b t"] | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> Any:
        """Logits (B, T, V), the loss of `labels`, and the cache.

        Args:
            input_ids: the tokens; with `past_key_values` those that follow what was read before.
            attention_mask: (B, S) over all S tokens read so far, 0 for padding, which with a cache
                may stand on the left only. Positions count from each row's first real token.
            past_key_values: a `NormattnCache`; it is extended.
            labels: the tokens themselves, −100 where none is counted: the loss is the mean
                cross-entropy in nats of labels[:, 1:] given the logits before them.
            use_cache: whether to hand out a cache; by default where no gradient is recorded.
            logits_to_keep: only the last so many positions' logits; 0 keeps all.
            output_attentions: refused, as is output_hidden_states.
            output_hidden_states: see there.
            return_dict: off for a tuple.

        Raises `InputError` for ids outside the vocabulary (on CPU), other shapes, foreign caches.
        """
        refuse_inner(output_attentions, output_hidden_states)
        ids = checked_ids(input_ids)
        if labels is not None and logits_to_keep:
            raise InputError("labels need all logits: leave logits_to_keep out")
        cache = self._cache(past_key_values, use_cache)
        before = 0 if cache is None else cache.get_seq_length()
        padding = padding_of(attention_mask, ids.shape[0], before + ids.shape[1])
        if cache is None:
            hidden = self.model.hidden(ids, padding)
        else:
            new = None if padding is None else padding[:, before:]
            hidden = self.model.hidden(ids, new, cache.held)
        logits = F.linear(hidden[:, -logits_to_keep:], self.model.head_weight)
        loss = None if labels is None else _next_token_loss(logits, labels)
        output = CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache)
        return as_asked(output, self.config, return_dict)

    def new_cache(self, max_length: int | None = None) -> NormattnCache:
        """An empty cache for the scores that are active now, as `CausalLM.new_cache`."""
        return NormattnCache(self.model.new_cache(max_length))

    def get_output_embeddings(self) -> Any:
        """The head; None where it is the embedding."""
        return self.model.head

    def _cache(self, given: Any, wanted: bool | None) -> NormattnCache | None:
        if given is not None:
            if not isinstance(given, NormattnCache):
                raise InputError(
                    f"past_key_values is a {type(given).__name__}, but these models keep keys as "
                    "their score reads them: leave it out, or give model.new_cache()"
                )
            return given
        if wanted is None:
            wanted = not torch.is_grad_enabled()
        return self.new_cache() if wanted else None

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *_: Any, **__: Any
    ) -> None:
        """Called by `generate` before the prompt is read."""
        if generation_config.cache_implementation is not None:
            raise InputError(
                f"cache_implementation={generation_config.cache_implementation!r} cannot serve: "
                "these models have a cache of their own; leave it out, or give "
                "past_key_values=model.new_cache(max_length)"
            )
        if generation_config.use_cache and model_kwargs.get("past_key_values") is None:
            model_kwargs["past_key_values"] = self.new_cache()


def _next_token_loss(logits: Float[Tensor, "b t v"], labels: Int[Tensor, "b t"]) -> Tensor:
    """Mean cross-entropy of each label given what stands before it."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
