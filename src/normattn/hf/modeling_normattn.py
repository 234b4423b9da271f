"""Our models as models of transformers: causal, masked and classifying, under the Auto classes."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import transformers
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
)
from transformers.modeling_outputs import (
    CausalLMOutputWithPast,
    MaskedLMOutput,
    SequenceClassifierOutput,
)

from normattn.errors import InputError
from normattn.hf.configuration import (
    NormattnBaseConfig,
    NormattnClassifierConfig,
    NormattnConfig,
    NormattnMaskedLMConfig,
)
from normattn.hf.generation_cache import NormattnCache
from normattn.models.causal_lm import CausalLM
from normattn.models.classifier import Classifier
from normattn.models.masked_lm import MaskedLM

# Half typed by transformers: taken as Any.
_Model: Any = transformers.PreTrainedModel


class NormattnModel(_Model):
    """A model of ours, `.model`, inside a `PreTrainedModel`.

    Made from its configuration (weights are then drawn as ours are), or around a model that is
    there already, which it shares. `save_pretrained` and `from_pretrained` are transformers', with
    the weights under `model.`; a post-hoc method that is switched on is not saved. A folder that
    lacks a weight is refused, where transformers would draw it at random. Methods after training
    are ours: `with model.model.using("YaRN", factor=4): …`.
    """

    base_model_prefix = "model"
    model: Any
    model_class: ClassVar[type[nn.Module]] = nn.Module
    _supports_sdpa = True

    def __init__(self, config: NormattnBaseConfig, model: nn.Module | None = None) -> None:
        super().__init__(config)
        self.model = type(self).model_class(config.ours) if model is None else model
        self.post_init()

    @classmethod
    def from_pretrained(cls, *source: Any, **options: Any) -> Any:
        """As transformers', but every weight must be there."""
        told = options.pop("output_loading_info", False)
        model, info = super().from_pretrained(*source, output_loading_info=True, **options)
        lacking = sorted(str(key) for key in (*info["missing_keys"], *info["mismatched_keys"]))
        if lacking:
            raise InputError(
                f"the weights in {source[0]} are not those of its configuration: {lacking[0]} is "
                "missing or has another shape"
            )
        return (model, info) if told else model

    def _init_weights(self, module: nn.Module) -> None:
        """Nothing: our models draw their weights when they are built."""

    def get_input_embeddings(self) -> Any:
        """The embedding of the tokens."""
        return self.model.embedding

    def set_input_embeddings(self, value: Any) -> None:
        """Put another embedding in its place."""
        self.model.embedding = value

    def resize_token_embeddings(self, *_: Any, **__: Any) -> Any:
        """Refused: the vocabulary is part of our configuration."""
        raise InputError(
            f"the vocabulary of {self.config.vocab_size} tokens is part of the model's settings; "
            "build a model with another vocab_size and copy the weights"
        )


def padding_of(mask: Tensor | None, rows: int, tokens: int) -> Bool[Tensor, "b s"] | None:
    """True where an attention mask (B, S) of `tokens` is 0; None where it nowhere is.

    Raises `InputError` for a mask of another shape or with other values than 0 and 1.
    """
    if mask is None:
        return None
    if mask.shape != (rows, tokens):
        raise InputError(
            f"attention_mask must be ({rows}, {tokens}), 1 for each token read so far and 0 for "
            f"padding, but it is {tuple(mask.shape)}"
        )
    padding = mask == 0
    if not bool((padding | (mask == 1)).all()):
        raise InputError("attention_mask must hold 1 for tokens and 0 for padding, nothing else")
    return padding if bool(padding.any()) else None


def refuse_inner(output_attentions: bool | None, output_hidden_states: bool | None) -> None:
    """Raise `InputError`: what is inside is seen through `normattn.lab.diagnostics`."""
    if output_attentions or output_hidden_states:
        raise InputError(
            "these models hand out neither attentions nor hidden states; see docs/diagnostics.md"
        )


def as_asked(output: Any, config: Any, return_dict: bool | None) -> Any:
    """The output, or a tuple of it where transformers' `return_dict` is off."""
    wanted = config.return_dict if return_dict is None else return_dict
    return output if wanted else output.to_tuple()


def checked_ids(ids: Tensor | None) -> Tensor:
    """The token ids; raises `InputError` where there are none."""
    if ids is None or ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32):
        description = "none" if ids is None else f"{ids.dtype} of {tuple(ids.shape)}"
        raise InputError(f"input_ids must be whole numbers (B, T), but they are {description}")
    return ids


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


class NormattnForMaskedLM(NormattnModel):
    """The hidden tokens of a text; exits, where there are any, are kept and not read."""

    config_class = NormattnMaskedLMConfig
    model_class = MaskedLM

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Int[Tensor, "b t"] | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> Any:
        """Logits (B, T, V), and the mean cross-entropy in nats of `labels` that are not −100.

        `attention_mask` (B, T) is 0 for padding, on either side. Raises `InputError` as
        `NormattnForCausalLM.forward`.
        """
        refuse_inner(output_attentions, output_hidden_states)
        ids = checked_ids(input_ids)
        logits = self.model(ids, padding_of(attention_mask, *ids.shape))
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        return as_asked(MaskedLMOutput(loss=loss, logits=logits), self.config, return_dict)

    def get_output_embeddings(self) -> Any:
        """The head; None where it is the embedding."""
        return self.model.head


class NormattnForSequenceClassification(NormattnModel):
    """The labels of a text, each by itself, or one of them (`problem_type`)."""

    config_class = NormattnClassifierConfig
    model_class = Classifier

    def __init__(self, config: NormattnClassifierConfig, model: nn.Module | None = None) -> None:
        labels = config.settings["labels"]
        if config.num_labels != labels:
            raise InputError(
                f"num_labels is {config.num_labels}, but the model's settings say {labels} labels"
            )
        super().__init__(config, model)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> Any:
        """Logits (B, K), and the loss of `labels` in nats.

        With `config.problem_type` "multi_label_classification" (default) labels are 0 or 1 as
        floats (B, K) and the loss is binary cross-entropy; with "single_label_classification" they
        are numbers (B,) and it is cross-entropy. Raises `InputError` for another problem type and
        labels of another shape.
        """
        refuse_inner(output_attentions, output_hidden_states)
        ids = checked_ids(input_ids)
        logits = self.model(ids, padding_of(attention_mask, *ids.shape))
        loss = None if labels is None else self._loss(logits.float(), labels)
        output = SequenceClassifierOutput(loss=loss, logits=logits)
        return as_asked(output, self.config, return_dict)

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        kind = self.config.problem_type
        if kind == "multi_label_classification" and labels.shape == logits.shape:
            return F.binary_cross_entropy_with_logits(logits, labels.float())
        if kind == "single_label_classification" and labels.shape == logits.shape[:1]:
            return F.cross_entropy(logits, labels)
        raise InputError(
            f"labels of {tuple(labels.shape)} do not fit logits of {tuple(logits.shape)} with "
            f"problem_type {kind!r}: multi_label_classification takes 0 or 1 (B, K), "
            "single_label_classification numbers (B,)"
        )


_HOMES: tuple[tuple[Any, Any], ...] = (
    (AutoModelForCausalLM, NormattnForCausalLM),
    (AutoModelForMaskedLM, NormattnForMaskedLM),
    (AutoModelForSequenceClassification, NormattnForSequenceClassification),
)


def register() -> None:
    """Make our three models known to `AutoConfig` and the `AutoModelFor…` classes.

    `import normattn.hf` does this where transformers is installed; doing it again changes nothing.
    """
    for auto, model in _HOMES:
        config = model.config_class
        AutoConfig.register(config.model_type, config, exist_ok=True)
        auto.register(config, model, exist_ok=True)


def wrap(model: nn.Module, **fields: Any) -> Any:
    """The `PreTrainedModel` around a `CausalLM`, `MaskedLM` or `Classifier`, sharing its weights.

    `fields` are transformers' own fields of the configuration (id2label=, …). `.model` of the
    result is `model` itself. Raises `InputError` for any other model.
    """
    for _, kind in _HOMES:
        if type(model) is kind.model_class:
            mode = model.training
            wrapped = kind(kind.config_class.of(model.config, **fields), model)
            return wrapped.train(mode)
    raise InputError(
        f"a {type(model).__name__} has no counterpart in transformers: there are "
        f"{', '.join(kind.model_class.__name__ for _, kind in _HOMES)}"
    )
