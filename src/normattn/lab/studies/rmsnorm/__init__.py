"""What does RMSNorm save against LayerNorm, and what does it cost? (relation classification)

The source's claim is that RMSNorm costs a little F1 and saves a little time. Both norms are
trained with the same seeds, batches and settings; the time of a step is measured with the steps of
both in turn, in one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import polars as pl
from pydantic import Field, field_validator

from normattn.errors import InputError
from normattn.lab.data.relations import RelationConfig, RelationData, prepare_relations
from normattn.lab.evaluation.classification import DevelopmentProbe, check_metrics
from normattn.lab.runs import read_status
from normattn.lab.stats import collected, joined
from normattn.lab.studies.rmsnorm.measuring import (
    CLASSIFIED,
    STEP_TIME,
    ClassifySettings,
    ClassifyStage,
    TimeStage,
    TimingSettings,
    training,
)
from normattn.lab.studies.rmsnorm.page import LAYER, PAGE, RMS
from normattn.lab.sweep.cell import read_cell
from normattn.lab.sweep.layout import CellPaths
from normattn.lab.sweep.settings import StudyPreset, merged, validated
from normattn.lab.sweep.stages import Stage, TrainStage
from normattn.lab.sweep.study import (
    Cell,
    Request,
    Study,
    Sweep,
    SweepConfig,
    cells_of,
    opened_as,
    refuse_choices,
    seeds_of,
    sweep_of,
)
from normattn.lab.training.tasks.classification import ClassificationConfig, ClassificationWorkload

KIND, TIME = "rmsnorm", "rmsnorm-time"
NORMS: dict[str, str] = {LAYER: "layer", RMS: "rms"}
"""The rows of the table, and the model's setting that each stands for."""
TIMED = "step time"
"""The directory of the cell that times the steps."""


class RMSNormPreset(StudyPreset):
    """One setting of the study; `training` holds fields of `ClassificationConfig`.

    The norm and the seed are no part of it, and the number of labels is that of the data.
    """

    training: dict[str, Any]
    evaluation: ClassifySettings = ClassifySettings()
    timing: TimingSettings = TimingSettings()
    seeds: int = Field(default=3, ge=1)

    @field_validator("training")
    @classmethod
    def _no_varied_field(cls, value: dict[str, Any]) -> dict[str, Any]:
        if "seed" in value or "norm" in value.get("model", {}):
            raise ValueError("the norm and the seed are varied by the table, not set by a preset")
        return value


class RMSNormConfig(SweepConfig):
    """What the study's cells share; `training` is whole but for norm and seed."""

    training: dict[str, Any]
    evaluation: ClassifySettings
    timing: TimingSettings


class NormCell(Cell):
    """A classifier with one of `NORMS`, trained with one seed."""

    kind: Literal["rmsnorm"] = "rmsnorm"
    training: dict[str, Any]
    evaluation: ClassifySettings

    @property
    def workload(self) -> ClassificationWorkload:
        """A multi-label classifier."""
        return ClassificationWorkload()

    @property
    def training_config(self) -> ClassificationConfig:
        """The settings of this cell's training run."""
        return _config(self.training, self.variant, self.seed)

    def stages(self, paths: CellPaths) -> list[Stage]:
        """Train, looking at the development set, then classify the test set."""
        config, every = self.training_config, self.evaluation.every

        def probes(data: RelationData) -> list[DevelopmentProbe]:
            return [DevelopmentProbe(data, every, config.precision)]

        return [
            TrainStage(self.workload, config, paths.run, probes=probes),
            ClassifyStage(paths.run, config, self.identity(CLASSIFIED), self.evaluation),
        ]


class TimeCell(NormCell):
    """Steps of models with each of `norms` in turn."""

    kind: Literal["rmsnorm-time"] = "rmsnorm-time"  # type: ignore[assignment]
    norms: tuple[str, ...]
    timing: TimingSettings

    @property
    def readings(self) -> int:
        """No row of the table."""
        return 0

    @property
    def training_config(self) -> ClassificationConfig:
        """The settings of the first norm."""
        return _config(self.training, self.norms[0], self.seed)

    def stages(self, paths: CellPaths) -> list[Stage]:
        """Time them."""
        configs = {norm: _config(self.training, norm, self.seed) for norm in self.norms}
        timed = self.identity(STEP_TIME)
        identities = {norm: replace(timed, row=norm, score=norm) for norm in self.norms}
        return [TimeStage(paths.run, configs, identities, self.timing)]


def _config(training: dict[str, Any], norm: str, seed: int) -> ClassificationConfig:
    fields = merged(training, {"seed": seed, "model.norm": NORMS[norm]})
    return ClassificationConfig.parse(fields, f"the settings of {norm} seed {seed}")


def resolve(request: Request) -> Sweep:
    """The study that a request asks for; `--variants` choose among LayerNorm and RMSNorm.

    Raises `InputError` for settings that cannot be, an unknown norm, data that is missing or
    damaged, and where torchmetrics is not installed.
    """
    preset = opened_as(request, KIND, RMSNormPreset)
    refuse_choices(request, KIND)
    check_metrics()
    config = RMSNormConfig.of(preset, training=_shared(preset))
    norms, seeds = _norms(request.variants), seeds_of(request, preset)
    cells = [*cells_of(NormCell, config, seeds, {norm: {} for norm in norms})]
    if len(norms) > 1:
        cells += cells_of(TimeCell, config, (0,), {TIMED: {"norms": norms}})
    for cell in {cell.variant: cell for cell in cells}.values():
        _ = cell.training_config  # Settings that cannot be are refused now.
    model = cells[0].training_config.model
    facts = (
        ("model", f"{model.layers} layers of width {model.dim}, {model.labels} labels"),
        ("norms", f"{', '.join(norms)}; seeds {', '.join(map(str, seeds))}"),
    )
    return sweep_of(request, KIND, config, cells, _describe, facts)


def _norms(asked: Sequence[str] | None) -> tuple[str, ...]:
    known = {name.lower(): name for name in NORMS}
    norms = []
    for name in asked or NORMS:
        if name.lower() not in known:
            raise InputError(f"there is no norm {name!r} here; there are {', '.join(NORMS)}")
        norms.append(known[name.lower()])
    return tuple(dict.fromkeys(norms))


def _shared(preset: RMSNormPreset) -> dict[str, Any]:
    """The preset's training settings whole, less norm and seed; the labels are the data's."""
    subject = f"preset {preset.name}, training"
    fields = preset.training
    if "labels" not in fields.get("model", {}):
        data = validated(RelationConfig, fields.get("data", {}), f"{subject}.data")
        count = data.modules if data.embedded else len(prepare_relations(data).labels)
        fields = merged(fields, {"model.labels": count})
    whole = ClassificationConfig.parse(fields, subject).model_dump(mode="json")
    del whole["seed"], whole["model"]["norm"]
    return whole


def _describe(cell: Cell, data: RelationData) -> list[str]:
    if isinstance(cell, TimeCell):
        return []
    config = cell.training_config
    assert isinstance(config, ClassificationConfig)
    cell.workload.check(config, data, config.accumulate)
    counts = " / ".join(f"{len(split):,}" for split in data)
    trained = {tuple(tokens) for tokens in data.train.tokens}
    again = sum(tuple(tokens) in trained for tokens in data.split("test").tokens)
    known = "learned from the training split" if config.data.vocabulary is None else "given"
    lines = [
        f"corpus {config.data.corpus}: {counts} documents to train, tune and test on, "
        f"{len(data.labels)} labels; {data.pieces.vocab_size:,} word pieces, {known}"
    ]
    cut = sum(split.cut for split in data)
    if cut:
        lines.append(f"{cut:,} documents are cut behind {config.data.max_tokens} word pieces")
    if again:
        lines.append(f"{again:,} of the test documents stand in the training split too")
    return lines


def collect(out: Path) -> pl.DataFrame:
    """Every measurement below `out`, and every training that ended as it went.

    Raises `InputError` where the test sets differ: such rows cannot be compared.
    """
    measured = collected(out)
    if measured.height:
        count = measured.filter(pl.col("protocol") == CLASSIFIED)["data"].n_unique()
        if count > 1:
            raise InputError(f"{out} holds tests of {count} data sets; report them apart")
    parts = [measured]
    for paths in CellPaths.below(out):
        cell, run = read_cell(paths.settings, STUDY), paths.run
        status = read_status(run)
        ended = status is not None and status.state in ("finished", "diverged")
        if ended and not isinstance(cell, TimeCell):
            parts.append(training(cell.identity("training"), run))
    return joined(parts)


STUDY = Study(
    name=KIND,
    help="Train a multi-label classifier with each norm, classify, time their steps in turn.\n\n"
    "Seeds are added by running it again with other --seeds on the same OUT; another "
    "setting that a result depends on is refused. It needs `pip install 'normattn[eval]'`.",
    resolve=resolve,
    cells=(NormCell, TimeCell),
    page=PAGE,
    variants="LayerNorm, RMSNorm, or both, by a comma. [default: both]",
    examples=(
        ("--preset smoke", "the whole path in about a minute"),
        ("", "the study itself: six trainings of 7.93M parameters"),
        ("--corpus FOLDER", "your own documents, in the form of NYT24"),
        ("--plan", "its cost"),
    ),
    collect=collect,
)
