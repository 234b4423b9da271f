"""Cells of Vision Transformers: trained with a score, tested image by image."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import polars as pl

from normattn.errors import InputError
from normattn.lab.data.images import ImageData
from normattn.lab.evaluation.classification import score_images
from normattn.lab.evaluation.scorer import weights_digest
from normattn.lab.stats import Identity, fact, identified, joined, sums
from normattn.lab.studies.qknorm.rated import RatedCell
from normattn.lab.studies.qknorm.rows import Trained
from normattn.lab.sweep.layout import CellPaths
from normattn.lab.sweep.measuring import MODEL
from normattn.lab.sweep.stages import MeasureStage, Note, Stage, TrainStage
from normattn.lab.training.distributed import choose_device
from normattn.lab.training.planning import Cost
from normattn.lab.training.tasks.vision import VisionTrainingConfig, VisionWorkload
from normattn.models.flops import flops_per_image, parameter_count
from normattn.models.pretrained import load_as
from normattn.models.vision_transformer import VisionTransformer
from normattn.score import ScoreSpec
from normattn.score.grammar import read
from normattn.score.parts import RotaryPosition, Slot

IMAGES = "images"
"""The experiment with Vision Transformers, and its protocol."""
SCORES = (
    *("Baseline", "QKLayerNorm", "QKRMSNorm", "QNA", "KNA", "CosA", "QKNorm2020"),
    *("QKBatchNorm", "QKInstanceNorm"),
)
"""The rows unless said."""
# Images of a source that has not been read yet, for the plan.
_GUESSED_IMAGES = 1000


class VisionCell(RatedCell):
    """A Vision Transformer with `score`, at `rate` times the learning rate of `training`.

    `training` is a `VisionTrainingConfig` less score and seed; `split` the images that are tested
    (settings are chosen on "validation", tables made on "test"). `score` says nothing of positions:
    as in ViT the model learns them (`KNA` is trained as `KNA-NoPE`), unless it names one.
    """

    kind: Literal["vision"] = "vision"
    experiment = IMAGES
    score: str
    split: Literal["test", "validation"] = "test"

    @property
    def workload(self) -> VisionWorkload:
        """Images with classes."""
        return VisionWorkload()

    @property
    def training_config(self) -> VisionTrainingConfig:
        """The settings of this cell's training run."""
        return self.rated(VisionTrainingConfig, {"model.score": vision_score(self.own_score)})

    @property
    def row(self) -> str:
        """The score, with what it is trained with."""
        return self.score

    def stages(self, paths: CellPaths) -> list[Stage]:
        """Train, then test."""
        config = self.training_config
        tested = replace(
            self.identity(IMAGES),
            score=str(config.model.score),
            length=config.model.tokens,
            train_length=config.model.tokens,
            split=self.split,
        )
        trained = TrainStage(self.workload, config, paths.run)
        return [trained, ImageStage(paths.run, config, tested)]


@dataclass(frozen=True)
class ImageStage(MeasureStage):
    """Test the model in `place` on every image of the split that `identity` names."""

    phase = "evaluation"
    frame = IMAGES
    config: VisionTrainingConfig
    identity: Identity

    @property
    def cost(self) -> Cost:
        """Unknown before the images are read: as of a thousand of them."""
        model = self.config.model
        flops = _GUESSED_IMAGES * flops_per_image(model).forward
        return Cost(scored=_GUESSED_IMAGES * model.tokens, flops=flops)

    def measured(self, data: ImageData, note: Note) -> pl.DataFrame:
        """Every image, and what the model is."""
        model = load_as(VisionTransformer, self.folder / MODEL, self.config.model).to(
            choose_device(self.config.device)
        )
        split = data.split(self.identity.split)
        scores = score_images(
            model, split, progress=lambda done, total: note(done, total, "images")
        )
        units = [f"{number:06}" for number in range(len(scores.loss))]
        ones = np.ones(len(units))
        tested = replace(self.identity, data=data.fingerprint, weights=weights_digest(model))
        results = (
            sums("accuracy", units, np.asarray(scores.correct), ones),
            sums("loss", units, np.asarray(scores.loss), ones),
        )
        facts = (
            fact("parameters", parameter_count(model)),
            fact("classes", model.config.classes),
        )
        trained = replace(tested, protocol="training")
        return joined([identified(tested, results), identified(trained, facts)])


def vision_score(score: str) -> str:
    """The score as the model is trained with it: without positions of its own unless it names some.

    Raises `InputError` for a score with a method that is applied after training.
    """
    spec = ScoreSpec.parse(score)
    if spec.method:
        raise InputError(f"{score} holds {spec.method}, which is applied after training")
    named = any(part.slot is Slot.POSITION for part, _ in read(score)[0])
    turned = isinstance(spec.position, RotaryPosition)
    return f"{score}-NoPE" if turned and not named else score


def vision_cells(
    training: Mapping[str, Any],
    rows: Iterable[Trained],
    seeds: Sequence[int] = (0,),
    rates: Sequence[float] = (1.0,),
    split: Literal["test", "validation"] = "test",
) -> tuple[VisionCell, ...]:
    """Every row at every rate; directories are called `vision ROW` and `vision ROW@xRATE`."""
    return tuple(
        VisionCell(
            variant=f"vision {row.name}" + ("" if rate == 1 else f"@x{rate:g}"),
            score=row.name,
            rate=rate,
            seed=seed,
            training=row.over(training),
            split=split,
        )
        for seed in seeds
        for rate in rates
        for row in rows
    )
