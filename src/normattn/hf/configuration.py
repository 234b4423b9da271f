"""The configurations of our models as transformers knows them: our own, held as plain JSON."""

from __future__ import annotations

from typing import Any, ClassVar

import transformers

from normattn.errors import InputError
from normattn.models.config import CausalLMConfig, ClassifierConfig, MaskedLMConfig, StackConfig

# Half typed by transformers: taken as Any.
_Config: Any = transformers.PretrainedConfig


class NormattnBaseConfig(_Config):
    """What the three have in common.

    `settings` is `model_dump(mode="json")` of our configuration, complete and checked again when
    it is read; `of` makes one from ours, and `ours` gives it back. Sizes have the names that
    transformers uses as well, read-only. Raises `InputError` as our configuration does.
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
        """The configuration that holds `config`; `more` are transformers' own fields."""
        return cls(settings=config.model_dump(mode="json"), **more)

    @property
    def ours(self) -> Any:
        """Our configuration."""
        return self.settings_class(**self.settings)

    @property
    def vocab_size(self) -> int:
        """The rows of the embedding that are tokens of the text."""
        return int(self.settings["vocab_size"])

    @property
    def hidden_size(self) -> int:
        """The width."""
        return int(self.settings["dim"])

    @property
    def num_hidden_layers(self) -> int:
        """The layers, a shared one counted as often as it is used."""
        return int(self.settings["layers"])

    @property
    def num_attention_heads(self) -> int:
        """The query heads."""
        return int(self.settings["heads"])

    @property
    def num_key_value_heads(self) -> int:
        """The key and value heads."""
        return int(self.settings["kv_heads"] or self.settings["heads"])

    @property
    def max_position_embeddings(self) -> int:
        """The training length; it bounds nothing."""
        return int(self.settings["train_length"])


class NormattnConfig(NormattnBaseConfig):
    """A `CausalLM`'s."""

    model_type = "normattn"
    settings_class = CausalLMConfig

    # Said in each class: transformers would write a constructor of its own where there is none.
    def __init__(self, settings: dict[str, Any] | None = None, **more: Any) -> None:
        super().__init__(settings, **more)


class NormattnMaskedLMConfig(NormattnBaseConfig):
    """A `MaskedLM`'s; the mask's id is `vocab_size`."""

    model_type = "normattn-masked-lm"
    settings_class = MaskedLMConfig

    def __init__(self, settings: dict[str, Any] | None = None, **more: Any) -> None:
        super().__init__(settings, **more)


class NormattnClassifierConfig(NormattnBaseConfig):
    """A `Classifier`'s; `num_labels` is its number of labels, each of them by itself by default."""

    model_type = "normattn-classifier"
    settings_class = ClassifierConfig

    def __init__(self, settings: dict[str, Any] | None = None, **more: Any) -> None:
        if isinstance(settings, dict) and more.get("id2label") is None and "labels" in settings:
            more.setdefault("num_labels", settings["labels"])
        if more.get("problem_type") is None:
            more["problem_type"] = "multi_label_classification"
        super().__init__(settings, **more)
