"""Training a Vision Transformer from one configuration to one saved model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from pydantic import Field, model_validator
from torch import Tensor

from normattn.errors import InputError
from normattn.lab.data.images import (
    ImageBatches,
    ImageData,
    ImageDataConfig,
    image_shape,
    look_for_images,
    prepare_images,
)
from normattn.lab.training.loop_config import LoopConfig
from normattn.lab.training.planning import Cost
from normattn.lab.training.reports import TrainingResult
from normattn.lab.training.seeds import derive_seed
from normattn.lab.training.vocabulary import check_batch
from normattn.lab.training.workload import Workload, rows_per_share, train_workload
from normattn.models.config import VisionConfig
from normattn.models.flops import flops_per_image, planned_parameters
from normattn.models.vision_transformer import VisionTransformer
from normattn.score import ScoreSpec


class VisionTrainingConfig(LoopConfig):
    """A Vision Transformer, its images, and how it is trained.

    model: as `VisionConfig`; height, width, channels and classes are those of `data` and may be
    left out. batch_size: images per optimiser step, over all processes and micro-batches, whose
    number must divide it. shift: every image is moved by up to so many pixels each time it is
    seen, 0 for not at all.
    """

    model: VisionConfig
    data: ImageDataConfig = ImageDataConfig()
    batch_size: int = Field(default=64, ge=1, le=10**7)
    shift: int = Field(default=0, ge=0)

    @property
    def scores(self) -> tuple[ScoreSpec, ...]:
        """The model's."""
        return (self.model.score,)

    @model_validator(mode="before")
    @classmethod
    def _fill_shape(cls, values: Any) -> Any:
        """The model's shape is that of the images; saying it twice is allowed, not needed."""
        if not isinstance(values, Mapping) or not isinstance(values.get("model"), Mapping):
            return values
        data = values.get("data", {})
        data = ImageDataConfig.model_validate(data) if isinstance(data, Mapping) else data
        missing = {"height", "width", "channels", "classes"} - values["model"].keys()
        if not missing or not isinstance(data, ImageDataConfig):
            return values
        shape = {key: value for key, value in asdict(image_shape(data)).items() if key in missing}
        return {**values, "model": {**values["model"], **shape}}

    @model_validator(mode="after")
    def _check_together(self) -> VisionTrainingConfig:
        check_batch(self.batch_size, self.accumulate)
        return self


class ImageBatch(NamedTuple):
    """Images in −1 … 1 and the class of each."""

    images: Float[Tensor, "b c h w"]
    labels: Int[Tensor, "b"]


class VisionTask:
    """Naming the class of each image."""

    def __init__(
        self, config: VisionTrainingConfig, batches: ImageBatches, device: torch.device
    ) -> None:
        self.config = config
        self.model = VisionTransformer(config.model).to(device)
        self._batches = batches

    @property
    def tokens_per_step(self) -> int:
        """Tokens that the blocks read in the global batch."""
        return self.config.batch_size * self.config.model.tokens

    def batch(self, step: int, share: int, shares: int) -> ImageBatch:
        """Part `share` of `shares` of the images of `step`."""
        images, labels = self._batches.batch(step, share, shares)
        return ImageBatch(torch.from_numpy(images), torch.from_numpy(labels))

    def loss(self, batch: ImageBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Mean cross-entropy in nats, and the share of images named right."""
        result = self.model.loss(*batch)
        return result.loss, {"accuracy": result.correct / len(batch.labels)}


class VisionWorkload(Workload[VisionTrainingConfig, ImageData]):
    """A Vision Transformer on images with classes."""

    kind = "vision"
    config_class = VisionTrainingConfig

    def prepare(self, config: VisionTrainingConfig) -> ImageData:
        """The images, split."""
        return prepare_images(config.data)

    def look(self, config: VisionTrainingConfig) -> tuple[str, ...]:
        """Whether the package or the folder is there."""
        look_for_images(config.data)
        return ()

    def check(self, config: VisionTrainingConfig, data: ImageData, shares: int) -> None:
        """The images must be of the model's shape, and every micro-batch have as many."""
        rows_per_share(config.batch_size, shares)
        for name, value in asdict(data.shape).items():
            if getattr(config.model, name) != value:
                raise InputError(
                    f"model.{name} is {getattr(config.model, name)}, but the images of "
                    f"{config.data.source} have {value}; leave it out"
                )
        _batches(config, data)

    def task(
        self, config: VisionTrainingConfig, data: ImageData, device: torch.device, shares: int
    ) -> VisionTask:
        """Classification on this device."""
        return VisionTask(config, _batches(config, data), device)

    def cost(self, config: VisionTrainingConfig) -> Cost:
        """Every token of every image."""
        images = config.steps * config.batch_size
        return Cost(
            trained=images * config.model.tokens,
            flops=images * flops_per_image(config.model).training,
            parameters=planned_parameters(VisionTransformer, config.model),
            kept=config.model.dim * config.model.layers,
        )


def train_vision(config: VisionTrainingConfig, out: Path | str, **choices: Any) -> TrainingResult:
    """Train a Vision Transformer in the run directory `out`; `choices` as `train_workload`."""
    return train_workload(VisionWorkload(), config, out, **choices)


def _batches(config: VisionTrainingConfig, data: ImageData) -> ImageBatches:
    seed = derive_seed(config.seed, "batches")
    return ImageBatches(data.train, config.batch_size, seed, config.shift)
