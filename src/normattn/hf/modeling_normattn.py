"""normattn's models as transformers models, for the Auto classes: causal, masked, classifying."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import transformers
from jaxtyping import Bool, Int
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_outputs import (
    CausalLMOutputWithPast,
    MaskedLMOutput,
    SequenceClassifierOutput,
)
from transformers.utils.generic import can_return_tuple

from normattn.errors import InputError
from normattn.hf.load import missing_weight
from normattn.models.cache import ModelCache
from normattn.models.causal_lm import CausalLM
from normattn.models.classifier import Classifier
from normattn.models.config import CausalLMConfig, ClassifierConfig, MaskedLMConfig, StackConfig
from normattn.models.masked_lm import MaskedLM
from normattn.models.utils import checked_ids

# transformers' types are incomplete, so these are Any.
_Config: Any = transformers.PretrainedConfig
_Model: Any = transformers.PreTrainedModel
_Cache: Any = transformers.Cache
_GenerationMixin: Any = transformers.GenerationMixin


class NormattnBaseConfig(_Config):
    """Base class of the three models' configurations.

    `settings` is `model_dump(mode="json")` of normattn's configuration, validated when it is read.
    `of` converts from that configuration and `ours` back to it. transformers' names of sizes are
    read-only properties. Raises `InputError` as normattn's configuration does.
    """

    has_no_defaults_at_init = True
    settings_class: ClassVar[type[StackConfig]] = StackConfig

    def __init__(self, settings: dict[str, Any] | None = None, **more: Any) -> None:
        if not isinstance(settings, dict):
            raise InputError(
                f"a {type(self).__name__} needs settings=…, the fields of a "
                f"{self.settings_class.__name__} (or use {type(self).__name__}.of(config))"
            )
        self.settings = self.settings_class(**settings).model_dump(mode="json")
        super().__init__(**more)

    @classmethod
    def of(cls, config: StackConfig, **more: Any) -> Any:
        """The configuration with normattn's `config`; `more` are fields of transformers."""
        return cls(settings=config.model_dump(mode="json"), **more)

    @property
    def ours(self) -> Any:
        """normattn's configuration."""
        return self.settings_class(**self.settings)

    vocab_size = property(lambda self: int(self.settings["vocab_size"]))
    hidden_size = property(lambda self: int(self.settings["dim"]))
    num_hidden_layers = property(lambda self: int(self.settings["layers"]))
    num_attention_heads = property(lambda self: int(self.settings["heads"]))
    num_key_value_heads = property(
        lambda self: int(self.settings["kv_heads"] or self.settings["heads"])
    )
    max_position_embeddings = property(lambda self: int(self.settings["train_length"]))


# Each class names an __init__, because transformers generates one otherwise.
class NormattnConfig(NormattnBaseConfig):
    """The configuration of a `CausalLM`."""

    model_type = "normattn"
    settings_class = CausalLMConfig
    __init__ = NormattnBaseConfig.__init__


class NormattnMaskedLMConfig(NormattnBaseConfig):
    """The configuration of a `MaskedLM`; the mask's id is `vocab_size`."""

    model_type = "normattn-masked-lm"
    settings_class = MaskedLMConfig
    __init__ = NormattnBaseConfig.__init__


class NormattnClassifierConfig(NormattnBaseConfig):
    """The configuration of a `Classifier` with `num_labels` labels, by default independent ones."""

    model_type = "normattn-classifier"
    settings_class = ClassifierConfig

    def __init__(self, settings: dict[str, Any] | None = None, **more: Any) -> None:
        if isinstance(settings, dict) and more.get("id2label") is None and "labels" in settings:
            more.setdefault("num_labels", settings["labels"])
        more["problem_type"] = more.get("problem_type") or "multi_label_classification"
        super().__init__(settings, **more)
        labels = self.settings["labels"]
        if self.num_labels != labels:
            raise InputError(
                f"num_labels is {self.num_labels}, but the model's settings say {labels} labels"
            )


class NormattnCache(_Cache):
    """A `ModelCache`, `.held`, with the interface of transformers' `Cache`."""

    def __init__(self, held: ModelCache) -> None:
        super().__init__(layers=[])
        self.held = held

    def __len__(self) -> int:
        return len(self.held.layers)

    def update(self, *_: Any, **__: Any) -> Any:
        """Raises `InputError`, because attention layers write to the cache themselves."""
        raise InputError("the layers of a normattn model write to their cache by themselves")

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The number of cached tokens."""
        return self.held.length

    def reorder_cache(self, beam_idx: Int[Tensor, " r"]) -> None:
        """Row i becomes the old row beam_idx[i]."""
        self.held.reorder(beam_idx)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last −tokens_to_remove tokens; raises `InputError` for a positive number."""
        if tokens_to_remove > 0:
            raise InputError(
                f"crop({tokens_to_remove}): give a negative number, that of the tokens to forget"
            )
        self.held.truncate(self.held.length + tokens_to_remove)

    def reset(self) -> None:
        """Remove all tokens."""
        self.held.truncate(0)

    is_compileable = property(lambda self: False)  # it grows
    # Whether the last tokens can always be removed: no layer has dropped keys.
    is_croppable = property(lambda self: all(layer.croppable for layer in self.held.layers))


class NormattnModel(_Model):
    """A normattn model, `.model`, inside a `PreTrainedModel`.

    It is built from its configuration, with normattn's initialisation, or shares an existing model.
    `save_pretrained` and `from_pretrained` are transformers', with the weights under `model.`; an
    active method is not saved. To apply one: `with model.model.using("YaRN", factor=4): …`.
    """

    base_model_prefix = "model"
    model: Any
    model_class: ClassVar[type[nn.Module]] = nn.Module
    _supports_sdpa = True
    accepts_loss_kwargs = False  # or the Trainer would pass num_items_in_batch

    def __init__(self, config: NormattnBaseConfig, model: nn.Module | None = None) -> None:
        super().__init__(config)
        self.model = type(self).model_class(config.ours) if model is None else model
        self.post_init()

    @classmethod
    def from_pretrained(cls, *source: Any, **options: Any) -> Any:
        """As in transformers, but raises `InputError` for a missing weight."""
        with_info = options.pop("output_loading_info", False)
        model, info = super().from_pretrained(*source, output_loading_info=True, **options)
        if (problem := missing_weight(info)) is not None:
            raise InputError(
                f"the weights in {source[0]} are not those of its configuration: {problem}"
            )
        return (model, info) if with_info else model

    def _init_weights(self, module: nn.Module) -> None:
        """Nothing: normattn's models initialise their weights when they are built."""

    def _refuse(self, unsupported: dict[str, Any]) -> None:
        """Raise `InputError` for an argument or output of other models, unless None or False."""
        asked = {x: getattr(self.config, x) for x in ("output_attentions", "output_hidden_states")}
        asked |= {name: value for name, value in unsupported.items() if value is not None}
        for name, value in asked.items():
            if value is not None and value is not False:
                raise InputError(
                    f"a {type(self).__name__} takes no {name}: it gives logits for input_ids and "
                    "attention_mask"
                )

    def _loss(self, logits: Tensor, labels: Tensor | None) -> Any:
        """transformers' loss for this class of model; each one uses some of the arguments."""
        if labels is None:
            return None
        names = {"logits": logits, "pooled_logits": logits, "labels": labels}
        return self.loss_function(**names, vocab_size=logits.shape[-1], config=self.config)

    def get_input_embeddings(self) -> Any:
        """The embedding of the tokens."""
        return self.model.embedding


def _padding_mask(ids: Tensor, mask: Tensor | None, before: int = 0) -> Bool[Tensor, "b s"] | None:
    """True where the mask over all tokens so far is 0, None without padding; checks the mask."""
    if mask is None:
        return None
    rows, tokens = checked_ids(ids, "input_ids").shape[0], before + ids.shape[1]
    padding = mask == 0
    if mask.shape != (rows, tokens) or not bool((padding | (mask == 1)).all()):
        raise InputError(
            f"attention_mask must be ({rows}, {tokens}), 1 for each token read so far and 0 for "
            f"padding, but it is {tuple(mask.shape)} or holds something else"
        )
    return padding if bool(padding.any()) else None


class NormattnForCausalLM(NormattnModel, _GenerationMixin):
    """Token t + 1 from tokens 0 … t; `generate` with greedy search, sampling and beams."""

    config_class = NormattnConfig
    model_class = CausalLM

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        labels: Int[Tensor, "b t"] | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        **unsupported: Any,
    ) -> Any:
        """Logits (B, T, V), the loss of `labels`, and the cache.

        `attention_mask` (B, S) covers all S tokens so far. With a cache, padding must be on the
        left; positions count from each row's first real token. The loss is the mean cross-entropy
        in nats of labels[:, 1:] that are not −100. By default a cache is returned where no gradient
        is recorded. `logits_to_keep` is the number of last positions; 0 keeps all.

        Raises `InputError` for ids outside the vocabulary (on CPU), other shapes, caches, options.
        """
        self._refuse(unsupported)
        if labels is not None and logits_to_keep:
            raise InputError("labels need all logits: leave logits_to_keep out")
        cache = past_key_values
        if cache is not None and not isinstance(cache, NormattnCache):
            raise InputError(
                f"past_key_values is a {type(cache).__name__}, but these models keep keys in "
                "their own format: leave it out, or give model.new_cache()"
            )
        if cache is None and (not torch.is_grad_enabled() if use_cache is None else use_cache):
            cache = self.new_cache()
        before = 0 if cache is None else cache.get_seq_length()
        ids = checked_ids(input_ids, "input_ids")
        padding = _padding_mask(ids, attention_mask, before)
        new = None if padding is None else padding[:, before:]
        hidden = self.model.hidden(ids, new, None if cache is None else cache.held)
        logits = F.linear(hidden[:, -logits_to_keep:], self.model.head_weight)
        loss = self._loss(logits, labels)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache)

    def new_cache(self, max_length: int | None = None) -> NormattnCache:
        """An empty cache for the active scores, as `CausalLM.new_cache`."""
        return NormattnCache(self.model.new_cache(max_length))

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *_: Any, **__: Any
    ) -> None:
        if generation_config.cache_implementation is not None:
            raise InputError(
                f"cache_implementation={generation_config.cache_implementation!r} cannot be "
                "used: these models have their own cache; leave it out, or give "
                "past_key_values=model.new_cache(max_length)"
            )
        if generation_config.use_cache and model_kwargs.get("past_key_values") is None:
            model_kwargs["past_key_values"] = self.new_cache()


class NormattnEncoder(NormattnModel):
    """A model without a cache: logits, and transformers' loss for them."""

    output_class: ClassVar[Any]

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        **unsupported: Any,
    ) -> Any:
        """Logits, and the loss of `labels` in nats.

        `attention_mask` (B, T) is 0 for padding, on either side. Raises as the causal model does.
        """
        self._refuse(unsupported)
        ids = checked_ids(input_ids, "input_ids")
        logits = self.model(ids, _padding_mask(ids, attention_mask))
        return self.output_class(loss=self._loss(logits, labels), logits=logits)


class NormattnForMaskedLM(NormattnEncoder):
    """The hidden tokens of a text; early exits are loaded and not used.

    Logits are (B, T, V); the loss is the mean cross-entropy of `labels` that are not −100.
    """

    config_class = NormattnMaskedLMConfig
    model_class = MaskedLM
    output_class = MaskedLMOutput


class NormattnForSequenceClassification(NormattnEncoder):
    """The labels of a text, several or one, by `config.problem_type`.

    Logits are (B, K). With "multi_label_classification" (the default) `labels` are 0 or 1 as floats
    (B, K), and the loss is binary cross-entropy. With "single_label_classification" they are class
    numbers (B,), and the loss is cross-entropy.
    """

    config_class = NormattnClassifierConfig
    model_class = Classifier
    output_class = SequenceClassifierOutput


_AUTO_CLASSES: tuple[tuple[Any, Any], ...] = (
    (transformers.AutoModelForCausalLM, NormattnForCausalLM),
    (transformers.AutoModelForMaskedLM, NormattnForMaskedLM),
    (transformers.AutoModelForSequenceClassification, NormattnForSequenceClassification),
)


def register() -> None:
    """Register the three models with `AutoConfig` and the `AutoModelFor…` classes.

    `import normattn.hf` calls this if transformers is installed. Calling it again changes nothing.
    """
    for auto, model in _AUTO_CLASSES:
        config = model.config_class
        transformers.AutoConfig.register(config.model_type, config, exist_ok=True)
        auto.register(config, model, exist_ok=True)


def wrap(model: nn.Module, **fields: Any) -> Any:
    """The `PreTrainedModel` around a `CausalLM`, `MaskedLM` or `Classifier`, sharing its weights.

    `fields` are transformers' fields of the configuration (id2label=, …). The result's `.model` is
    `model` itself. Raises `InputError` for any other model.
    """
    for _, wrapper in _AUTO_CLASSES:
        if type(model) is wrapper.model_class:
            training = model.training
            wrapped = wrapper(wrapper.config_class.of(model.config, **fields), model)
            return wrapped.train(training)
    raise InputError(
        f"a {type(model).__name__} has no counterpart in transformers: there are "
        f"{', '.join(kind.model_class.__name__ for _, kind in _AUTO_CLASSES)}"
    )
