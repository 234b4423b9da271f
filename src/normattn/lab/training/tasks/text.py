"""Train causal and masked language models on a corpus of tokens."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field, model_validator
from torch import Tensor, nn

from normattn.lab.data.batches import MaskedBatches, Masking, TrainingBatches
from normattn.lab.data.tokens import DataConfig, TokenData, prepare_tokens
from normattn.lab.training.config import CHANGEABLE
from normattn.lab.training.init_from import Continuation, new_model, refuse_other_tokeniser
from normattn.lab.training.tasks.base import BatchTrainingConfig, Loss
from normattn.models import CausalLM, CausalLMConfig
from normattn.models.config import MaskedLMConfig
from normattn.models.flops import flops_per_token, stack_flops
from normattn.models.masked_lm import MaskedLM


class TextTrainingConfig(BatchTrainingConfig):
    """A language model on a corpus. Its vocab_size follows from `data` and may be left out.

    The run's directory gets the tokeniser, if there is one.
    """

    prepare_data: ClassVar[Any] = staticmethod(prepare_tokens)
    # A continued run is identified by its initial weights; their folder may move.
    changeable: ClassVar[frozenset[str]] = CHANGEABLE | {"continued.start"}

    data: DataConfig = DataConfig()
    continued: Continuation | None = None

    @classmethod
    def from_data(cls, data: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the vocabulary size of the data."""
        return {"vocab_size": data.vocab_size}, {}

    @model_validator(mode="after")
    def _check_continued(self) -> TextTrainingConfig:
        if self.continued is not None:
            self.continued.check(self.model)
        return self

    def make_model(self) -> nn.Module:
        """Return a new model, or the one that training continues from."""
        model: nn.Module = new_model(self.model_class, self.model, self.continued)
        return model

    def check(self, data: TokenData, shards: int) -> None:
        """Raise also if the model to continue has another tokeniser."""
        refuse_other_tokeniser(self.continued, data)
        super().check(data, shards)


class TrainingConfig(TextTrainingConfig):
    """A causal language model, its data, and how it is trained on random windows of a corpus.

    model: as `CausalLMConfig`; its train_length is the length of every training sequence.
    continued: the saved model whose weights training starts from, with a method and a length;
    `model` then has that model's settings.
    """

    kind: ClassVar[str] = "causal-lm"
    model_class: ClassVar[Any] = CausalLM

    model: CausalLMConfig

    @property
    def sequence_length(self) -> int:
        """Tokens of a training sequence: the length in `continued`, else the train_length."""
        length = None if self.continued is None else self.continued.length
        return self.model.train_length if length is None else length

    def batches(self, data: TokenData, seed: int) -> TrainingBatches:
        """Return batches of windows of length + 1 tokens."""
        length, tiling = self.sequence_length, self.data.tiling
        return TrainingBatches(data.train, length, self.batch_size, seed, tiling)

    def loss(self, model: Any, batch: Tensor, shards: int) -> Loss:
        """Return the mean cross-entropy in nats, and the accuracy."""
        result = model.loss(batch)
        return result.loss, {"accuracy": result.correct / batch[:, 1:].numel()}

    def step_cost(self) -> tuple[int, float]:
        """Return the targets and FLOPs of a step."""
        tokens = self.batch_size * self.sequence_length
        return tokens, tokens * flops_per_token(self.model, self.sequence_length).training


class MaskedConfig(TextTrainingConfig):
    """A masked language model, its data, and how it is trained to predict hidden tokens.

    model: as `MaskedLMConfig`; its train_length is the length of every training sequence.
    continued: the saved model whose weights training starts from, maybe with another score; without
    method and length.
    """

    kind: ClassVar[str] = "masked-lm"
    model_class: ClassVar[Any] = MaskedLM

    model: MaskedLMConfig
    masking: Masking = Masking()
    # Not dumped if None, so that older runs keep their digests.
    continued: Annotated[Continuation | None, Field(exclude_if=lambda start: start is None)] = None

    def batches(self, data: TokenData, seed: int) -> MaskedBatches:
        """Return batches of inputs, positions to predict, and their targets."""
        # A training window has one more token than its length, for next-token targets.
        length, tiling = self.model.train_length - 1, self.data.tiling
        windows = TrainingBatches(data.train, length, self.batch_size, seed, tiling)
        return MaskedBatches(windows, self.masking, self.model.vocab_size)

    def loss(self, model: Any, batch: Any, shards: int) -> Loss:
        """Return the mean cross-entropy in nats and the accuracy over the chosen tokens."""
        result = model.loss(*batch)
        metrics = {"accuracy": result.correct / result.tokens}
        for layer, accuracy in enumerate(result.exit_correct / result.tokens, start=1):
            metrics[f"accuracy_exit_{layer}"] = accuracy
        return result.loss, metrics

    def step_cost(self) -> tuple[int, float]:
        """Return the input tokens and FLOPs of a step. Heads compute the chosen tokens only."""
        model, length, rows = self.model, self.model.train_length, self.batch_size
        chosen = self.masking.chosen(length)
        heads = model.layers if model.exits else 1
        head = 3 * 2.0 * model.vocab_size * model.dim * heads
        return rows * length, rows * (length * stack_flops(model, length).training + chosen * head)
