"""Training multi-label classifiers of documents."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from normattn.errors import InputError
from normattn.io import write_json
from normattn.lab.data.relations import (
    RelationBatches,
    RelationConfig,
    RelationData,
    prepare_relations,
)
from normattn.lab.training.tasks.workload import (
    BatchTrainingConfig,
    Loss,
    Workload,
    train_workload,
)
from normattn.models.classifier import Classifier
from normattn.models.config import ClassifierConfig
from normattn.models.flops import stack_flops

LABELS, VOCABULARY = "labels.json", "vocab.txt"
NOMINAL_LENGTH = 75
"""Tokens of a document that a run's cost assumes before its data is read.

As many as a document of the embedded corpus has on average.
"""


class ClassificationConfig(BatchTrainingConfig):
    """A classifier, its documents, and how it is trained.

    model: as `ClassifierConfig`; its vocab_size is that of `data` and may be left out, so may its
    train_length, which is then `data.max_tokens`. Its labels are as many as the data has.
    """

    model: ClassifierConfig
    data: RelationConfig = RelationConfig()

    @classmethod
    def decided(cls, data: Any) -> dict[str, Any]:
        """The model's vocabulary is that of the word pieces."""
        return {"vocab_size": data.vocab_size}

    @classmethod
    def suggested(cls, data: Any, given: Mapping[str, Any]) -> dict[str, Any]:
        """Documents are cut at `max_tokens`."""
        return {"train_length": max(2, data.max_tokens)}


class ClassificationWorkload(Workload[ClassificationConfig, RelationData]):
    """A classifier of relations; the names of its labels are left beside it."""

    kind = "classification"
    config_class = ClassificationConfig

    model_class = Classifier
    prepare_data = staticmethod(prepare_relations)

    def check(self, config: ClassificationConfig, data: RelationData, shards: int) -> None:
        """As many labels as the model has, and at least one batch of documents."""
        if len(data.labels) != config.model.labels:
            raise InputError(
                f"model.labels is {config.model.labels}, but {config.data.corpus} has "
                f"{len(data.labels)} labels"
            )
        super().check(config, data, shards)

    def batches(
        self, config: ClassificationConfig, data: RelationData, seed: int
    ) -> RelationBatches:
        """Documents with their padding and labels."""
        return RelationBatches(data.train, len(data.labels), data.pad, config.batch_size, seed)

    def loss(self, config: ClassificationConfig, model: Any, batch: Any, shards: int) -> Loss:
        """Binary cross-entropy in nats, the mean over documents and labels."""
        return model.loss(*batch), {}

    def tokens_per_step(self, config: ClassificationConfig, batches: Any) -> int:
        """Word pieces of the global batch, on average."""
        mean: float = batches.mean_tokens
        return round(config.batch_size * mean)

    def work(self, config: ClassificationConfig) -> tuple[int, float]:
        """Every token, for documents of a nominal length."""
        length = min(NOMINAL_LENGTH, config.data.max_tokens)
        tokens = config.batch_size * length
        return tokens, tokens * stack_flops(config.model, length).training

    def leave(self, data: RelationData, out: Path) -> None:
        """The names of the labels, and the word pieces."""
        write_json(out / LABELS, {"labels": list(data.labels)})
        data.pieces.save(out / VOCABULARY)


train_classifier = partial(train_workload, ClassificationWorkload())
"""Train a classifier as `train_workload` does, from `config` and `out`."""
