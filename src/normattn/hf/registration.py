"""Our models under transformers' Auto classes, and around models that are there already."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
)

from normattn.errors import InputError
from normattn.hf.causal_model import NormattnForCausalLM
from normattn.hf.classifier_model import NormattnForSequenceClassification
from normattn.hf.masked_model import NormattnForMaskedLM

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
