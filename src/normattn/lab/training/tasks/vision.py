"""Training Vision Transformers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from pydantic import Field

from normattn.errors import InputError
from normattn.lab.data.images import (
    ImageBatches,
    ImageData,
    ImageDataConfig,
    image_shape,
    prepare_images,
)
from normattn.lab.training.tasks.workload import (
    BatchTrainingConfig,
    Loss,
    Workload,
    train_workload,
)
from normattn.models.config import VisionConfig
from normattn.models.flops import flops_per_image
from normattn.models.vision_transformer import VisionTransformer


class VisionTrainingConfig(BatchTrainingConfig):
    """A Vision Transformer, its images, and how it is trained.

    model: as `VisionConfig`; height, width, channels and classes are those of `data` and may be
    left out. shift: every image is moved by up to so many pixels each time it is seen, 0 for not at
    all.
    """

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


class VisionWorkload(Workload[VisionTrainingConfig, ImageData]):
    """A Vision Transformer on images with classes."""

    kind = "vision"
    config_class = VisionTrainingConfig

    model_class = VisionTransformer
    prepare_data = staticmethod(prepare_images)

    def check(self, config: VisionTrainingConfig, data: ImageData, shards: int) -> None:
        """The images must be of the model's shape, and every micro-batch have as many."""
        for name, value in data.shape.items():
            if getattr(config.model, name) != value:
                raise InputError(
                    f"model.{name} is {getattr(config.model, name)}, but the images of "
                    f"{config.data.source} have {value}; leave it out"
                )
        super().check(config, data, shards)

    def batches(self, config: VisionTrainingConfig, data: ImageData, seed: int) -> ImageBatches:
        """Images in −1 … 1 and the class of each."""
        return ImageBatches(data.train, config.batch_size, seed, config.shift)

    def loss(self, config: VisionTrainingConfig, model: Any, batch: Any, shards: int) -> Loss:
        """Mean cross-entropy in nats, and the share of images named right."""
        images, labels = batch
        result = model.loss(images, labels)
        return result.loss, {"accuracy": result.correct / len(labels)}

    def work(self, config: VisionTrainingConfig) -> tuple[int, float]:
        """Every token of every image."""
        images = config.batch_size
        return images * config.model.tokens, images * flops_per_image(config.model).training


train_vision = partial(train_workload, VisionWorkload())
"""Train a Vision Transformer as `train_workload` does, from `config` and `out`."""
