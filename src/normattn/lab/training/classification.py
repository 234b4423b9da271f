"""Training a multi-label classifier from one configuration to one saved model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field, model_validator
from torch import Tensor

from normattn.atomic import write_json
from normattn.errors import InputError
from normattn.lab.data.relations import (
    RelationBatches,
    RelationConfig,
    RelationData,
    look_for_relations,
    prepare_relations,
)
from normattn.lab.training.loop_config import LoopConfig
from normattn.lab.training.planning import Cost
from normattn.lab.training.reports import TrainingResult
from normattn.lab.training.seeds import derive_seed
from normattn.lab.training.task import Task
from normattn.lab.training.vocabulary import check_batch
from normattn.lab.training.workload import Workload, rows_per_share, train_workload
from normattn.models.classifier import Classifier
from normattn.models.config import ClassifierConfig
from normattn.models.flops import planned_parameters, stack_flops
from normattn.score import ScoreSpec

LABELS, VOCABULARY = "labels.json", "vocab.txt"
NOMINAL_LENGTH = 75
"""Tokens of a document by which a training's cost is told before its data is read.

As many as a document of the embedded corpus has on average.
"""


class ClassificationConfig(LoopConfig):
    """A classifier, its documents, and how it is trained.

    model: as `ClassifierConfig`; its vocab_size is that of `data` and may be left out, so may its
    train_length, which is then `data.max_tokens`. Its labels are as many as the data has.
    batch_size: documents per optimiser step, over all processes and micro-batches, whose number
    must divide it.
    """

    model: ClassifierConfig
    data: RelationConfig = RelationConfig()
    batch_size: int = Field(default=32, ge=1, le=10**7)

    @property
    def scores(self) -> tuple[ScoreSpec, ...]:
        """The model's."""
        return (self.model.score,)

    @model_validator(mode="before")
    @classmethod
    def _fill_model(cls, values: Any) -> Any:
        """What the data decides; saying it twice is allowed, not needed."""
        if not isinstance(values, Mapping) or not isinstance(values.get("model"), Mapping):
            return values
        given = values.get("data", {})
        data = given if isinstance(given, RelationConfig) else RelationConfig.model_validate(given)
        decided = {"vocab_size": data.vocab_size, "train_length": max(2, data.max_tokens)}
        return {**values, "model": {**decided, **values["model"]}}

    @model_validator(mode="after")
    def _check_together(self) -> ClassificationConfig:
        if self.model.vocab_size != self.data.vocab_size:
            raise ValueError(
                f"model.vocab_size is {self.model.vocab_size} but data.vocab_size is "
                f"{self.data.vocab_size}; leave the first one out"
            )
        check_batch(self.batch_size, self.accumulate)
        return self


class ClassificationBatch(NamedTuple):
    """`data.relations.RelationBatch` as tensors."""

    ids: Int[Tensor, "b t"]
    padding: Bool[Tensor, "b t"]
    labels: Float[Tensor, "b k"]


class ClassificationTask:
    """Which labels a document has."""

    def __init__(
        self, config: ClassificationConfig, data: RelationData, device: torch.device
    ) -> None:
        self.config = config
        self.model = Classifier(config.model).to(device)
        self._batches = _batches(config, data)

    @property
    def tokens_per_step(self) -> int:
        """Word pieces of the global batch, on average."""
        return round(self.config.batch_size * self._batches.mean_tokens)

    def batch(self, step: int, share: int, shares: int) -> ClassificationBatch:
        """Part `share` of `shares` of the documents of `step`."""
        rows = self._batches.batch(step, share, shares)
        parts = (rows.ids, rows.padding, rows.labels)
        return ClassificationBatch(*(torch.from_numpy(part) for part in parts))

    def loss(self, batch: ClassificationBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Binary cross-entropy in nats, the mean over documents and labels."""
        return self.model.loss(batch.ids, batch.padding, batch.labels), {}


class ClassificationWorkload(Workload[ClassificationConfig, RelationData]):
    """A classifier of relations; the names of its labels are left beside it."""

    kind = "classification"
    config_class = ClassificationConfig

    def prepare(self, config: ClassificationConfig) -> RelationData:
        """The documents as word pieces."""
        return prepare_relations(config.data)

    def look(self, config: ClassificationConfig) -> tuple[str, ...]:
        """Whether the folder has its files, and the vocabulary is there."""
        look_for_relations(config.data)
        return ()

    def check(self, config: ClassificationConfig, data: RelationData, shares: int) -> None:
        """As many labels as the model has, and at least one batch of documents."""
        if len(data.labels) != config.model.labels:
            raise InputError(
                f"model.labels is {config.model.labels}, but {config.data.corpus} has "
                f"{len(data.labels)} labels"
            )
        rows_per_share(config.batch_size, shares)
        _batches(config, data)

    def task(
        self, config: ClassificationConfig, data: RelationData, device: torch.device, shares: int
    ) -> ClassificationTask:
        """Which labels a document has, on this device."""
        return ClassificationTask(config, data, device)

    def cost(self, config: ClassificationConfig) -> Cost:
        """Every token of every step, for documents of a nominal length."""
        length = min(NOMINAL_LENGTH, config.data.max_tokens)
        tokens = config.steps * config.batch_size * length
        flops = tokens * stack_flops(config.model, length).training
        return Cost(
            trained=tokens,
            flops=flops,
            parameters=planned_parameters(Classifier, config.model),
            kept=config.model.dim * config.model.layers,
        )

    def export(self, task: Task, data: RelationData, out: Path) -> None:
        """The names of the labels, the word pieces, and the model."""
        write_json(out / LABELS, {"labels": list(data.labels)})
        data.pieces.save(out / VOCABULARY)
        super().export(task, data, out)


def train_classifier(
    config: ClassificationConfig, out: Path | str, **choices: Any
) -> TrainingResult:
    """Train a classifier in the run directory `out`; `choices` as `train_workload`."""
    return train_workload(ClassificationWorkload(), config, out, **choices)


def _batches(config: ClassificationConfig, data: RelationData) -> RelationBatches:
    seed = derive_seed(config.seed, "batches")
    return RelationBatches(data.train, len(data.labels), data.pad, config.batch_size, seed)
