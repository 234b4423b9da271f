"""Training a causal language model from one configuration to one saved model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from normattn.lab.data import TokenData, TrainingBatches, look_for_tokens, prepare_tokens
from normattn.lab.training.config import TrainingConfig
from normattn.lab.training.continuation import new_model, refuse_other_tokeniser
from normattn.lab.training.corpus_record import leave_tokeniser
from normattn.lab.training.loop_config import CHANGEABLE
from normattn.lab.training.planning import Cost
from normattn.lab.training.reports import TrainingResult
from normattn.lab.training.seeds import derive_seed
from normattn.lab.training.task import Task
from normattn.lab.training.workload import Workload, rows_per_share, train_workload
from normattn.models.flops import flops_per_token, parameter_count


class CausalTask:
    """Next-token prediction on random windows of a corpus."""

    def __init__(
        self, config: TrainingConfig, batches: TrainingBatches, device: torch.device
    ) -> None:
        self.config = config
        self.model = new_model(config.model, config.continued).to(device)
        self._batches = batches

    @property
    def tokens_per_step(self) -> int:
        """Targets in the global batch."""
        return self.config.batch_size * self.config.sequence_length

    def batch(self, step: int, share: int, shares: int) -> Tensor:
        """Part `share` of `shares` of the sequences of `step`, (rows, length + 1) int64."""
        return torch.from_numpy(self._batches.batch(step, share, shares))

    def loss(self, batch: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Mean cross-entropy in nats, and the share of tokens predicted right."""
        result = self.model.loss(batch)
        targets = batch.shape[0] * (batch.shape[1] - 1)
        return result.loss, {"accuracy": result.correct / targets}


class CausalWorkload(Workload[TrainingConfig, TokenData]):
    """A causal language model on a corpus of tokens; its tokeniser is left beside it."""

    kind = "causal-lm"
    config_class = TrainingConfig
    # The weights decide where a continued run starts; their folder may move.
    changeable = CHANGEABLE | {"continued.start"}

    def prepare(self, config: TrainingConfig) -> TokenData:
        """The corpus as tokens."""
        return prepare_tokens(config.data)

    def look(self, config: TrainingConfig) -> tuple[str, ...]:
        """What the corpus needs, where there is such a one."""
        return look_for_tokens(config.data)

    def check(self, config: TrainingConfig, data: TokenData, shares: int) -> None:
        """Every micro-batch must have as many sequences, each no longer than the corpus.

        A continued model must have been trained with the same tokeniser.
        """
        rows_per_share(config.batch_size, shares)
        refuse_other_tokeniser(config.continued, data)
        _batches(config, data)

    def task(
        self, config: TrainingConfig, data: TokenData, device: torch.device, shares: int
    ) -> CausalTask:
        """Next-token prediction on this device."""
        return CausalTask(config, _batches(config, data), device)

    def cost(self, config: TrainingConfig) -> Cost:
        """Every target of every step."""
        tokens = config.steps * config.batch_size * config.sequence_length
        per_token = flops_per_token(config.model, config.sequence_length).training
        return Cost(
            trained=tokens,
            flops=tokens * per_token,
            parameters=parameter_count(config.model),
            kept=config.model.dim * config.model.layers,
        )

    def export(self, task: Task, data: TokenData, out: Path) -> None:
        """The tokeniser and the model."""
        leave_tokeniser(data, out)
        super().export(task, data, out)


def train_causal(config: TrainingConfig, out: Path | str, **choices: Any) -> TrainingResult:
    """Train a causal language model in the run directory `out`; `choices` as `train_workload`."""
    return train_workload(CausalWorkload(), config, out, **choices)


def _batches(config: TrainingConfig, data: TokenData) -> TrainingBatches:
    return TrainingBatches(
        data.train,
        config.sequence_length,
        config.batch_size,
        derive_seed(config.seed, "batches"),
        config.data.tiling,
    )
