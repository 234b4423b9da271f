"""Everything that decides a training run of a causal language model, as one checked value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field, model_validator

from normattn.data import DataConfig
from normattn.models import CausalLMConfig
from normattn.training.continuation import Continuation
from normattn.training.loop_config import LoopConfig


class TrainingConfig(LoopConfig):
    """A causal language model, its data, and how it is trained.

    model: as `CausalLMConfig`; its vocab_size is that of `data` and may be left out, and its
    train_length is the length of every training sequence. batch_size: sequences per optimiser
    step, over all processes and micro-batches, whose number must divide it. continued: the saved
    model whose weights training starts from, under which method and at which length it goes on;
    `model` is then that model's settings.
    """

    model: CausalLMConfig
    data: DataConfig = DataConfig()
    batch_size: int = Field(default=32, ge=1, le=10**7)
    continued: Continuation | None = None

    @model_validator(mode="before")
    @classmethod
    def _fill_vocabulary(cls, values: Any) -> Any:
        """The model's vocabulary is the tokeniser's; saying it twice is allowed, not needed."""
        if not isinstance(values, Mapping) or not isinstance(values.get("model"), Mapping):
            return values
        model = dict(values["model"])
        data = values.get("data", {})
        if isinstance(data, Mapping):
            size = data.get("vocab_size", DataConfig.model_fields["vocab_size"].default)
        else:
            size = getattr(data, "vocab_size", None)
        model.setdefault("vocab_size", size)
        return {**values, "model": model}

    @model_validator(mode="after")
    def _check_together(self) -> TrainingConfig:
        if self.model.vocab_size != self.data.vocab_size:
            raise ValueError(
                f"model.vocab_size is {self.model.vocab_size} but data.vocab_size is "
                f"{self.data.vocab_size}; leave the first one out"
            )
        if self.batch_size % self.accumulate:
            raise ValueError(
                f"batch_size {self.batch_size} does not divide into {self.accumulate} "
                "micro-batches; accumulate must divide it"
            )
        if self.continued is not None:
            self.continued.check(self.model)
        return self

    @property
    def sequence_length(self) -> int:
        """Tokens of a training sequence: the model's train_length, or what `continued` says."""
        longer = None if self.continued is None else self.continued.length
        return self.model.train_length if longer is None else longer
