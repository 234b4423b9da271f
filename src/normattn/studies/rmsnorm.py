"""LayerNorm against RMSNorm on relation classification: F1 and time, in one run.

The source's claim is that RMSNorm costs a little F1 and saves a little time. Both norms are
trained with the same seeds, batches and settings; the time of a step is measured with the steps of
both in turn, in one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from normattn.data.relations import RelationConfig, RelationData, prepare_relations
from normattn.errors import InputError
from normattn.evaluation.classification import DevelopmentProbe, check_metrics
from normattn.reports.classification_record import read_classification
from normattn.reports.rmsnorm import rmsnorm_report
from normattn.reports.rmsnorm_records import Training, read_step_times, whole_time
from normattn.runs import read_metrics, read_status
from normattn.studies._rmsnorm_stages import (
    RECORD,
    STEP_TIME,
    ClassifySettings,
    ClassifyStage,
    TimeStage,
    TimingSettings,
)
from normattn.studies._tabulate import say_where
from normattn.sweep.layout import CellPaths
from normattn.sweep.merging import merged
from normattn.sweep.settings import StudyPreset, validated
from normattn.sweep.stages import Stage, TrainStage
from normattn.sweep.study import (
    Cell,
    Request,
    Sweep,
    SweepConfig,
    opened_as,
    place_of,
    refuse_choices,
    seeds_of,
)
from normattn.training.classification import ClassificationConfig, ClassificationWorkload

KIND, TIME = "rmsnorm", "rmsnorm-time"
NORMS: dict[str, str] = {"LayerNorm": "layer", "RMSNorm": "rms"}
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
            ClassifyStage(config, paths.run, self.variant, self.evaluation),
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
        return [TimeStage(configs, paths.run, self.timing)]


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
    config = RMSNormConfig(
        preset=preset.name,
        training=_shared(preset),
        evaluation=preset.evaluation,
        timing=preset.timing,
    )
    norms, seeds = _norms(request.variants), seeds_of(request, preset)
    cells: list[NormCell] = [
        NormCell(variant=norm, seed=seed, training=config.training, evaluation=config.evaluation)
        for seed in seeds
        for norm in norms
    ]
    if len(norms) > 1:
        cells.append(
            TimeCell(
                variant=TIMED,
                seed=0,
                training=config.training,
                evaluation=config.evaluation,
                norms=norms,
                timing=config.timing,
            )
        )
    for cell in cells:
        _ = cell.training_config  # Settings that cannot be are refused now.
    model = cells[0].training_config.model
    return Sweep(
        study=KIND,
        config=config,
        cells=tuple(cells),
        skipped=(),
        out=place_of(request, KIND, preset),
        report=report,
        describe=_describe,
        facts=(
            ("model", f"{model.layers} layers of width {model.dim}, {model.labels} labels"),
            ("norms", f"{', '.join(norms)}; seeds {', '.join(map(str, seeds))}"),
        ),
    )


def _norms(asked: Sequence[str] | None) -> tuple[str, ...]:
    known = {name.lower(): name for name in NORMS}
    found = []
    for name in asked or NORMS:
        if name.lower() not in known:
            raise InputError(f"there is no norm {name!r} here; there are {', '.join(NORMS)}")
        found.append(known[name.lower()])
    return tuple(dict.fromkeys(found))


def _shared(preset: RMSNormPreset) -> dict[str, Any]:
    """The preset's training settings whole, less norm and seed; the labels are the data's."""
    what = f"preset {preset.name}, training"
    fields = preset.training
    if "labels" not in fields.get("model", {}):
        data = validated(RelationConfig, fields.get("data", {}), f"{what}.data")
        count = data.modules if data.embedded else len(prepare_relations(data).labels)
        fields = merged(fields, {"model.labels": count})
    whole = ClassificationConfig.parse(fields, what).model_dump(mode="json")
    del whole["seed"], whole["model"]["norm"]
    return whole


def _describe(cell: Cell, data: RelationData) -> list[str]:
    if isinstance(cell, TimeCell):
        return []
    config = cell.training_config
    assert isinstance(config, ClassificationConfig)
    cell.workload.check(config, data, config.accumulate)
    counts = " / ".join(f"{len(split):,}" for split in data.splits.values())
    trained = {tuple(tokens) for tokens in data.train.tokens}
    again = sum(tuple(tokens) in trained for tokens in data.split("test").tokens)
    known = "learned from the training split" if config.data.vocabulary is None else "given"
    lines = [
        f"corpus {config.data.corpus}: {counts} documents to train, tune and test on, "
        f"{len(data.labels)} labels; {data.pieces.vocab_size:,} word pieces, {known}"
    ]
    cut = sum(split.cut for split in data.splits.values())
    if cut:
        lines.append(f"{cut:,} documents are cut behind {config.data.max_tokens} word pieces")
    if again:
        lines.append(f"{again:,} of the test documents stand in the training split too")
    return lines


def report(out: Path) -> None:
    """Write the table and the figure of what was measured in `out`."""
    places = sorted((out / "cells").glob("*/seed*"))
    records = [read_classification(p / RECORD) for p in places if (p / RECORD).is_file()]
    trainings = {
        (record.variant, record.seed): _training(CellPaths.of(out, record.variant, record.seed).run)
        for record in records
    }
    diverged = {
        f"{place.parent.name}, seed {place.name.removeprefix('seed')}": status.message
        for place in places
        if (status := read_status(place)) is not None and status.state == "diverged"
    }
    times = out / "cells" / TIMED / "seed0" / STEP_TIME
    timed = read_step_times(times) if times.is_file() else None
    say_where(out, len(rmsnorm_report(records, trainings, timed, diverged, out)))


def _training(run: Path) -> Training:
    """The training in the directory `run` as it went."""
    metrics = read_metrics(run / "metrics.jsonl")
    if not metrics:
        raise InputError(f"{run} holds no metrics.jsonl of its training")
    steps = int(metrics[-1]["step"])
    return Training(
        steps=steps,
        metrics=tuple(metrics),
        development=tuple(read_metrics(run / "development.jsonl")),
        seconds=whole_time(read_metrics(run / "timing.jsonl"), steps),
    )
