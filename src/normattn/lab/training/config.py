"""Everything that decides a training run of a causal language model, as one checked value."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from normattn.lab.data import DataConfig
from normattn.lab.training.continuation import Continuation
from normattn.lab.training.loop_config import LoopConfig
from normattn.lab.training.vocabulary import check_batch, check_vocabulary, fill_vocabulary
from normattn.models import CausalLMConfig
from normattn.score import ScoreSpec


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
        return fill_vocabulary(values)

    @model_validator(mode="after")
    def _check_together(self) -> TrainingConfig:
        check_vocabulary(self.model.vocab_size, self.data)
        check_batch(self.batch_size, self.accumulate)
        if self.continued is not None:
            self.continued.check(self.model)
        return self

    @property
    def scores(self) -> tuple[ScoreSpec, ...]:
        """The model's."""
        return (self.model.score,)

    @property
    def sequence_length(self) -> int:
        """Tokens of a training sequence: the model's train_length, or what `continued` says."""
        longer = None if self.continued is None else self.continued.length
        return self.model.train_length if longer is None else longer
