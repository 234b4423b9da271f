"""Cells of Vision Transformers: trained with a score, tested image by image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from normattn.data.images import ImageData
from normattn.errors import InputError
from normattn.evaluation.fingerprints import weights_digest
from normattn.evaluation.images import score_images
from normattn.models.accounting import parameter_count
from normattn.models.pretrained import load_as
from normattn.models.vision_transformer import VisionTransformer, flops_per_image
from normattn.recipes.layout import CellPaths, peek
from normattn.recipes.merging import merged
from normattn.recipes.settings import validated
from normattn.recipes.stages import Note, Stage, TrainStage
from normattn.recipes.studies import Cell
from normattn.recipes.tabulate import origin
from normattn.reports.diagnostics_records import read_diagnostics
from normattn.reports.vision_record import (
    VisionDivergence,
    VisionRecord,
    read_vision,
    write_vision,
)
from normattn.runs import read_status
from normattn.score import ScoreSpec
from normattn.score.part import RotaryPosition
from normattn.training.distribution import choose_device
from normattn.training.vision import VisionTrainingConfig, VisionWorkload
from normattn.training.workload import MODEL, Cost

KIND = "vision"
RECORD = "vision.json"
VARIANTS = (
    *("Baseline", "QKLayerNorm", "QKRMSNorm", "QNA", "KNA", "CosA", "QKNorm2020"),
    *("QKBatchNorm", "QKInstanceNorm"),
)
"""The rows unless said."""
# Images of a source that has not been read yet, for the plan.
_GUESSED_IMAGES = 1000


class VisionCell(Cell):
    """A Vision Transformer with `score`, at `rate` times the learning rate of `training`.

    `training` is a `VisionTrainingConfig` less score and seed; `split` the images that are tested
    (settings are chosen on "validation", tables made on "test"). `score` says nothing of positions:
    as in ViT the model learns them (`KNA` is trained as `KNA-NoPE`), unless it names one.
    """

    kind: Literal["vision"] = "vision"
    score: str
    rate: float = Field(default=1.0, gt=0)
    training: dict[str, Any]
    split: Literal["test", "validation"] = "test"

    @property
    def workload(self) -> VisionWorkload:
        """Images with classes."""
        return VisionWorkload()

    @property
    def training_config(self) -> VisionTrainingConfig:
        """The settings of this cell's training run."""
        varied = {"seed": self.seed, "model.score": vision_score(self.score)}
        what = f"the settings of {self.name}"
        config = VisionTrainingConfig.parse(merged(self.training, varied), what)
        if self.rate == 1:
            return config
        rate = {"optimiser.lr": config.optimiser.lr * self.rate}
        return VisionTrainingConfig.parse(merged(self.training, varied, rate), what)

    def stages(self, paths: CellPaths) -> list[Stage]:
        """Train, then test."""
        config = self.training_config
        tested = ImageStage(config, paths.run, self.score, self.rate, self.split)
        return [TrainStage(self.workload, config, paths.run), tested]


@dataclass(frozen=True)
class ImageStage(Stage):
    """Test the model in `place` on every image of a split."""

    phase = "evaluation"
    config: VisionTrainingConfig
    place: Path
    score: str
    rate: float
    split: str

    @property
    def cost(self) -> Cost:
        """Unknown before the images are read: as of a thousand of them."""
        model = self.config.model
        flops = _GUESSED_IMAGES * flops_per_image(model).forward
        return Cost(scored=_GUESSED_IMAGES * model.tokens, flops=flops)

    def is_done(self) -> bool:
        """Whether the record is there."""
        return (self.place / RECORD).is_file()

    def run(self, data: ImageData, note: Note) -> str | None:
        """Test, unless it is on record."""
        if self.is_done():
            return None
        model = load_as(VisionTransformer, self.place / MODEL, self.config.model).to(
            choose_device(self.config.device)
        )
        found = score_images(
            model, data.split(self.split), progress=lambda done, total: note(done, total, "images")
        )
        seen = read_diagnostics(self.place)
        largest = [line.most("largest") for line in seen]
        record = VisionRecord(
            score=self.score,
            spec=str(model.config.score),
            rate=self.rate,
            learning_rate=self.config.optimiser.lr,
            seed=self.config.seed,
            weights=weights_digest(model),
            data=data.fingerprint,
            split=self.split,
            steps=self.config.steps,
            parameters=parameter_count(model),
            tokens_per_image=model.config.tokens,
            classes=model.config.classes,
            loss=found.loss,
            correct=found.correct,
            largest=max((most for most in largest if most is not None), default=None),
            entropy_share=seen[-1].mean("entropy_share") if seen else None,
        )
        write_vision(self.place / RECORD, record)
        return None


def vision_score(score: str) -> str:
    """The score as the model is trained with it: without positions of its own unless it names some.

    Raises `InputError` for a score with a method that is applied after training.
    """
    spec = ScoreSpec.parse(score)
    if spec.method:
        raise InputError(f"{score} holds {spec.method}, which is applied after training")
    named = "RoPE" in score or "XPos" in score
    turned = isinstance(spec.position, RotaryPosition)
    return f"{score}-NoPE" if turned and not named else score


def vision_cells(
    training: Mapping[str, Any],
    scores: Sequence[str] = VARIANTS,
    seeds: Sequence[int] = (0,),
    rates: Sequence[float] = (1.0,),
    split: Literal["test", "validation"] = "test",
) -> tuple[VisionCell, ...]:
    """Every score at every rate; directories are called `vision SCORE` and `vision SCORE@xRATE`."""
    return tuple(
        VisionCell(
            variant=f"vision {score}" + ("" if rate == 1 else f"@x{rate:g}"),
            score=score,
            rate=rate,
            seed=seed,
            training=dict(training),
            split=split,
        )
        for seed in seeds
        for rate in rates
        for score in scores
    )


def vision_records(out: Path) -> tuple[list[VisionRecord], list[VisionDivergence]]:
    """Everything that the vision cells of a study's directory came to."""
    records: list[VisionRecord] = []
    diverged: list[VisionDivergence] = []
    for settings in sorted((out / "jobs").glob("vision */seed*/cell.json")):
        fields = peek(settings)
        if fields.get("kind") != KIND:
            continue
        cell = validated(VisionCell, fields, str(settings))
        run = CellPaths.of_job(settings.parent).run
        if (run / RECORD).is_file():
            records.append(read_vision(run / RECORD))
            continue
        status = read_status(run)
        if status is not None and status.state == "diverged":
            rate = cell.training_config.optimiser.lr
            ended = (cell.seed, status.step, origin(status.message))
            diverged.append(VisionDivergence(cell.score, cell.rate, rate, *ended))
    return records, diverged


def vision_setting(config: VisionTrainingConfig) -> dict[str, str]:
    """What is trained on what, for a plan or a page."""
    model, shift = config.model, config.shift
    moved = f", moved by up to {shift} pixel{'s' * (shift > 1)}" if shift else ""
    return {
        "images": f"{config.data.source}, {model.height} × {model.width}{moved}",
        "model": (
            f"width {model.dim}, {model.layers} layers, {model.heads} heads, {model.placement}, "
            f"patches of {model.patch} × {model.patch}, "
            f"{'a class token' if model.pool == 'class' else 'the mean of the patches'}"
        ),
        "training": (
            f"{config.steps:,} steps of {config.batch_size} images, learning rate "
            f"{config.optimiser.lr:g}, dropout {model.dropout:g}"
        ),
    }
