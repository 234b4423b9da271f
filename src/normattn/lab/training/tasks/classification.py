"""Training classifiers: of documents with several labels, and of images (Vision Transformers)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from normattn.errors import InputError
from normattn.io import write_json
from normattn.lab.data.images import (
    ImageBatches,
    ImageData,
    ImageDataConfig,
    image_shape,
    prepare_images,
)
from normattn.lab.data.relations import (
    RelationBatches,
    RelationConfig,
    RelationData,
    prepare_relations,
)
from normattn.lab.training.tasks.base import BatchTrainingConfig, Loss
from normattn.models.classifier import Classifier
from normattn.models.config import ClassifierConfig, VisionConfig
from normattn.models.flops import flops_per_image, stack_flops
from normattn.models.vision_transformer import VisionTransformer

LABELS, VOCABULARY = "labels.json", "vocab.txt"
NOMINAL_LENGTH = 75
"""Tokens of a document that a run's cost assumes before its data is read.

As many as a document of the embedded corpus has on average.
"""


class ClassificationConfig(BatchTrainingConfig):
    """A classifier, its documents, and how it is trained.

    model: as `ClassifierConfig`; its vocab_size is that of `data` and may be left out, so may its
    train_length, which is then `data.max_tokens`. Its labels are as many as the data has. Their
    names and the word pieces are left in the run's directory.
    """

    kind: ClassVar[str] = "classification"
    model_class: ClassVar[Any] = Classifier
    prepare_data: ClassVar[Any] = staticmethod(prepare_relations)

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

    def check(self, data: RelationData, shards: int) -> None:
        """As many labels as the model has, and at least one batch of documents."""
        if len(data.labels) != self.model.labels:
            raise InputError(
                f"model.labels is {self.model.labels}, but {self.data.corpus} has "
                f"{len(data.labels)} labels"
            )
        super().check(data, shards)

    def batches(self, data: RelationData, seed: int) -> RelationBatches:
        """Documents with their padding and labels."""
        return RelationBatches(data.train, len(data.labels), data.pad_id, self.batch_size, seed)

    def loss(self, model: Any, batch: Any, shards: int) -> Loss:
        """Binary cross-entropy in nats, the mean over documents and labels."""
        return model.loss(*batch), {}

    def tokens_per_step(self, batches: Any) -> int:
        """Word pieces of the global batch, on average."""
        return round(self.batch_size * float(batches.mean_tokens))

    def work(self) -> tuple[int, float]:
        """Every token, for documents of a nominal length."""
        length = min(NOMINAL_LENGTH, self.data.max_tokens)
        tokens = self.batch_size * length
        return tokens, tokens * stack_flops(self.model, length).training

    def leave(self, data: RelationData, out: Path) -> None:
        """The names of the labels, and the word pieces."""
        write_json(out / LABELS, {"labels": list(data.labels)})
        data.tokeniser.save(out / VOCABULARY)


class VisionTrainingConfig(BatchTrainingConfig):
    """A Vision Transformer, its images, and how it is trained.

    model: as `VisionConfig`; height, width, channels and classes are those of `data` and may be
    left out. shift: every image is moved by up to so many pixels each time it is seen, 0 for not at
    all.
    """

    kind: ClassVar[str] = "vision"
    model_class: ClassVar[Any] = VisionTransformer
    prepare_data: ClassVar[Any] = staticmethod(prepare_images)

    model: VisionConfig
    data: ImageDataConfig = ImageDataConfig()
    batch_size: int = Field(default=64, ge=1, le=10**7)
    shift: int = Field(default=0, ge=0)

    @classmethod
    def suggested(cls, data: Any, given: Mapping[str, Any]) -> dict[str, Any]:
        """The model's shape is that of the images, which are looked at only where it is missing."""
        if {"height", "width", "channels", "classes"} <= given.keys():
            return {}
        return {**image_shape(data)}

    def check(self, data: ImageData, shards: int) -> None:
        """The images must be of the model's shape, and every micro-batch have as many."""
        for name, value in data.shape.items():
            if getattr(self.model, name) != value:
                raise InputError(
                    f"model.{name} is {getattr(self.model, name)}, but the images of "
                    f"{self.data.source} have {value}; leave it out"
                )
        super().check(data, shards)

    def batches(self, data: ImageData, seed: int) -> ImageBatches:
        """Images in −1 … 1 and the class of each."""
        return ImageBatches(data.train, self.batch_size, seed, self.shift)

    def loss(self, model: Any, batch: Any, shards: int) -> Loss:
        """Mean cross-entropy in nats, and the share of images named right."""
        images, labels = batch
        result = model.loss(images, labels)
        return result.loss, {"accuracy": result.correct / len(labels)}

    def work(self) -> tuple[int, float]:
        """Every token of every image."""
        images = self.batch_size
        return images * self.model.tokens, images * flops_per_image(self.model).training
