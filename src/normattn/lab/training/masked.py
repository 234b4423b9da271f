"""Training a masked language model from one configuration to one saved model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from jaxtyping import Int
from pydantic import Field, model_validator
from torch import Tensor

from normattn.lab.data import (
    DataConfig,
    TokenData,
    TrainingBatches,
    look_for_tokens,
    prepare_tokens,
)
from normattn.lab.data.batches import MaskedBatches, MaskedRows, Masking
from normattn.lab.training.continuation import (
    Continuation,
    new_masked_model,
    refuse_other_tokeniser,
)
from normattn.lab.training.corpus_record import leave_tokeniser
from normattn.lab.training.loop_config import CHANGEABLE, LoopConfig
from normattn.lab.training.planning import Cost
from normattn.lab.training.reports import TrainingResult
from normattn.lab.training.seeds import derive_seed
from normattn.lab.training.task import Task
from normattn.lab.training.vocabulary import check_batch, check_vocabulary, fill_vocabulary
from normattn.lab.training.workload import Workload, rows_per_share, train_workload
from normattn.models.config import MaskedLMConfig
from normattn.models.flops import planned_parameters, stack_flops
from normattn.models.masked_lm import MaskedLM
from normattn.score import ScoreSpec
from normattn.structured import Settings


class MaskingConfig(Settings):
    """The shares of `Masking`: of the tokens that are chosen, then of what becomes of those."""

    share: float = Field(default=0.15, gt=0, le=1)
    masked: float = Field(default=0.8, ge=0, le=1)
    random: float = Field(default=0.1, ge=0, le=1)

    @model_validator(mode="after")
    def _check(self) -> MaskingConfig:
        if self.masked + self.random > 1:
            raise ValueError(
                f"masked {self.masked:g} and random {self.random:g} are more than 1 together"
            )
        return self

    def of(self, vocab_size: int) -> Masking:
        """The masking of a vocabulary."""
        return Masking(vocab_size, self.share, self.masked, self.random)


class MaskedConfig(LoopConfig):
    """A masked language model, its data, and how it is trained.

    model: as `MaskedLMConfig`; its vocab_size is that of `data` and may be left out, and its
    train_length is the length of every training sequence. batch_size: sequences per optimiser
    step, over all processes and micro-batches, whose number must divide it. continued: the saved
    model whose weights training starts from, of this score or another; without method and length.
    """

    model: MaskedLMConfig
    data: DataConfig = DataConfig()
    batch_size: int = Field(default=32, ge=1, le=10**7)
    masking: MaskingConfig = MaskingConfig()
    # Left out of a dump where it is off: runs that were made before it stay the same.
    continued: Annotated[Continuation | None, Field(exclude_if=lambda start: start is None)] = None

    @property
    def scores(self) -> tuple[ScoreSpec, ...]:
        """The model's."""
        return (self.model.score,)

    @model_validator(mode="before")
    @classmethod
    def _fill_vocabulary(cls, values: Any) -> Any:
        """The model's vocabulary is the tokeniser's; saying it twice is allowed, not needed."""
        return fill_vocabulary(values)

    @model_validator(mode="after")
    def _check_together(self) -> MaskedConfig:
        check_vocabulary(self.model.vocab_size, self.data)
        check_batch(self.batch_size, self.accumulate)
        if self.continued is not None and (self.continued.method or self.continued.length):
            raise ValueError("continued: a masked language model goes on without method and length")
        return self


class MaskedBatch(NamedTuple):
    """What the model reads, the places that it is asked for, and what stood there."""

    ids: Int[Tensor, "b t"]
    places: Int[Tensor, "b m"]
    targets: Int[Tensor, "b m"]

    @classmethod
    def of(cls, rows: MaskedRows) -> MaskedBatch:
        """The same as tensors."""
        return cls(*(torch.from_numpy(array) for array in rows))


class MaskedTask:
    """Prediction of the hidden tokens of random windows of a corpus."""

    def __init__(self, config: MaskedConfig, batches: MaskedBatches, device: torch.device) -> None:
        self.config = config
        self.model = new_masked_model(config.model, config.continued).to(device)
        self._batches = batches

    @property
    def tokens_per_step(self) -> int:
        """Tokens that are read in the global batch; a share of them are targets."""
        return self.config.batch_size * self.config.model.train_length

    def batch(self, step: int, share: int, shares: int) -> MaskedBatch:
        """Part `share` of `shares` of the sequences of `step`, of train_length tokens each."""
        return MaskedBatch.of(self._batches.batch(step, share, shares))

    def loss(self, batch: MaskedBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Mean cross-entropy in nats over the chosen tokens, and the share of them that are hit."""
        result = self.model.loss(*batch)
        accuracy = result.correct / result.tokens
        exits = result.exit_correct / result.tokens
        named = {f"accuracy_exit_{layer}": hits for layer, hits in enumerate(exits, start=1)}
        return result.loss, {"accuracy": accuracy, **named}


class MaskedWorkload(Workload[MaskedConfig, TokenData]):
    """A masked language model on a corpus of tokens; its tokeniser is left beside it."""

    kind = "masked-lm"
    config_class = MaskedConfig
    # The weights decide where a continued run starts; their folder may move.
    changeable = CHANGEABLE | {"continued.start"}

    def prepare(self, config: MaskedConfig) -> TokenData:
        """The corpus as tokens."""
        return prepare_tokens(config.data)

    def look(self, config: MaskedConfig) -> tuple[str, ...]:
        """What the corpus needs, where there is such a one."""
        return look_for_tokens(config.data)

    def check(self, config: MaskedConfig, data: TokenData, shares: int) -> None:
        """Every micro-batch must have as many sequences, each no longer than the corpus.

        A continued model must have been trained with the same tokeniser.
        """
        rows_per_share(config.batch_size, shares)
        refuse_other_tokeniser(config.continued, data)
        _batches(config, data)

    def task(
        self, config: MaskedConfig, data: TokenData, device: torch.device, shares: int
    ) -> MaskedTask:
        """Prediction of hidden tokens on this device."""
        return MaskedTask(config, _batches(config, data), device)

    def cost(self, config: MaskedConfig) -> Cost:
        """Every token that is read; the head, and those of the exits, see the chosen ones."""
        model, length = config.model, config.model.train_length
        rows = config.steps * config.batch_size
        chosen = config.masking.of(model.vocab_size).chosen(length)
        heads = 1 + (model.layers - 1 if model.exits else 0)
        head = 3 * 2.0 * model.vocab_size * model.dim * heads
        flops = rows * (length * stack_flops(model, length).training + chosen * head)
        return Cost(
            trained=rows * length,
            flops=flops,
            parameters=planned_parameters(MaskedLM, model),
            kept=model.dim * model.layers,
        )

    def export(self, task: Task, data: TokenData, out: Path) -> None:
        """The tokeniser and the model."""
        leave_tokeniser(data, out)
        super().export(task, data, out)


def train_masked(config: MaskedConfig, out: Path | str, **choices: Any) -> TrainingResult:
    """Train a masked language model in the run directory `out`; `choices` as `train_workload`."""
    return train_workload(MaskedWorkload(), config, out, **choices)


def _batches(config: MaskedConfig, data: TokenData) -> MaskedBatches:
    # A training window holds one token more than its length, for next-token targets.
    windows = TrainingBatches(
        data.train,
        config.model.train_length - 1,
        config.batch_size,
        derive_seed(config.seed, "batches"),
        config.data.tiling,
    )
    return MaskedBatches(windows, config.masking.of(config.model.vocab_size))
