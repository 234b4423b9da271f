"""Train classifiers of documents (multi-label) and of images (Vision Transformers)."""

from __future__ import annotations

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
"""Tokens of a document for cost estimates: the mean of the default corpus."""


class ClassificationConfig(BatchTrainingConfig):
    """A classifier of documents, its data, and how it is trained.

    model: as `ClassifierConfig`. vocab_size follows from `data` and may be left out. train_length
    defaults to `data.max_tokens`. labels must be the number of labels of the data. The run's
    directory gets the names of the labels and the vocabulary.
    """

    kind: ClassVar[str] = "classification"
    model_class: ClassVar[Any] = Classifier
    prepare_data: ClassVar[Any] = staticmethod(prepare_relations)
    tokeniser_file: ClassVar[str] = VOCABULARY

    model: ClassifierConfig
    data: RelationConfig = RelationConfig()

    @classmethod
    def from_data(cls, data: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the vocabulary size, and `max_tokens` as the default training length."""
        return {"vocab_size": data.vocab_size}, {"train_length": max(2, data.max_tokens)}

    def check(self, data: RelationData, shards: int) -> None:
        """Raise also if the model and the data differ in the number of labels."""
        if len(data.labels) != self.model.labels:
            raise InputError(
                f"model.labels is {self.model.labels}, but {self.data.corpus} has "
                f"{len(data.labels)} labels"
            )
        super().check(data, shards)

    def batches(self, data: RelationData, seed: int) -> RelationBatches:
        """Return batches of documents with padding and labels."""
        return RelationBatches(data.train, len(data.labels), data.pad_id, self.batch_size, seed)

    def loss(self, model: Any, batch: Any, shards: int) -> Loss:
        """Return the binary cross-entropy in nats, the mean over documents and labels."""
        return model.loss(*batch), {}

    def tokens_per_step(self, batches: Any) -> int:
        """Return the mean number of word pieces in the global batch."""
        return round(self.batch_size * float(batches.mean_tokens))

    def step_cost(self) -> tuple[int, float]:
        """Return tokens and FLOPs for documents of a nominal length."""
        length = min(NOMINAL_LENGTH, self.data.max_tokens)
        tokens = self.batch_size * length
        return tokens, tokens * stack_flops(self.model, length).training

    def save_extras(self, data: RelationData, out: Path) -> None:
        """Write the names of the labels and the vocabulary."""
        write_json(out / LABELS, {"labels": list(data.labels)})
        super().save_extras(data, out)


class VisionTrainingConfig(BatchTrainingConfig):
    """A Vision Transformer, its images, and how it is trained.

    model: as `VisionConfig`; height, width, channels and classes follow from `data` and may be left
    out. shift: augmentation, each image moves by up to `shift` pixels.
    """

    kind: ClassVar[str] = "vision"
    model_class: ClassVar[Any] = VisionTransformer
    prepare_data: ClassVar[Any] = staticmethod(prepare_images)

    model: VisionConfig
    data: ImageDataConfig = ImageDataConfig()
    batch_size: int = Field(default=64, ge=1, le=10**7)
    shift: int = Field(default=0, ge=0)

    @classmethod
    def from_data(cls, data: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the shape of the images."""
        return image_shape(data), {}

    def batches(self, data: ImageData, seed: int) -> ImageBatches:
        """Return batches of images in −1 … 1 and their classes."""
        return ImageBatches(data.train, self.batch_size, seed, self.shift)

    def loss(self, model: Any, batch: Any, shards: int) -> Loss:
        """Return the mean cross-entropy in nats, and the accuracy."""
        images, labels = batch
        result = model.loss(images, labels)
        return result.loss, {"accuracy": result.correct / len(labels)}

    def step_cost(self) -> tuple[int, float]:
        """Return the tokens and FLOPs of a batch of images."""
        images = self.batch_size
        return images * self.model.tokens, images * flops_per_image(self.model).training
