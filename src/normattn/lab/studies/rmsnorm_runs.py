"""What the norm study trains and measures: classifiers, and the time of their steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import polars as pl
from pydantic import Field, field_validator

from normattn.errors import InputError
from normattn.lab.data.relations import RelationConfig, RelationData, prepare_relations
from normattn.lab.evaluation.classification import (
    DevelopmentProbe,
    check_metrics,
    evaluate_classifier,
)
from normattn.lab.runs import read_metrics
from normattn.lab.runs.environment import threads
from normattn.lab.runs.timing import interleave
from normattn.lab.stats import (
    Identity,
    fact,
    identified,
    joined,
    sums,
)
from normattn.lab.studies.preset import StudyPreset, opened_as
from normattn.lab.sweep.config import SweepConfig, merged, validated
from normattn.lab.sweep.paths import RunPaths
from normattn.lab.sweep.run import Note, Request, Run, Stage, Sweep, measuring_stage, training_stage
from normattn.lab.training.distributed import World, choose_device, world
from normattn.lab.training.planning import Cost
from normattn.lab.training.step import TrainStep
from normattn.lab.training.tasks.classification import (
    NOMINAL_LENGTH,
    ClassificationConfig,
    ClassificationWorkload,
)
from normattn.lab.training.tasks.workload import MODEL
from normattn.models.classifier import Classifier
from normattn.models.flops import stack_flops
from normattn.models.pretrained import load_as
from normattn.settings import Settings

LAYER, RMS = "LayerNorm", "RMSNorm"
NORMS: dict[str, str] = {LAYER: "layer", RMS: "rms"}
"""The rows of the table, and the model's setting that each stands for."""
TIMED = "step time"
"""The variant, and the directory, of the run that times the steps."""
CLASSIFIED, STEP_TIME, DEVELOPMENT = "classification", "step time", "development"
"""The protocols; the first two are also the names of their records."""
GUESSED_DOCUMENTS = 1000
"""Documents of data that has not been read yet, for the plan."""
WARM = 3

# Runs


class ClassifySettings(Settings):
    """How classifiers are measured.

    The development set is looked at after every `every` steps. `max_tokens` is what a batch of
    documents holds without gradients (memory, never a result).
    """

    every: int = Field(default=100, ge=1)
    max_tokens: int = Field(default=16384, ge=1)


class TimingSettings(Settings):
    """How often a step of each norm is timed: once in each of `rounds`."""

    rounds: int = Field(default=30, ge=2)


class RMSNormPreset(StudyPreset):
    """One setting of the study; `training` holds fields of `ClassificationConfig`.

    The norm and the seed are no part of it, and the number of labels is that of the data.
    """

    evaluation: ClassifySettings = ClassifySettings()
    timing: TimingSettings = TimingSettings()
    seeds: int = Field(default=3, ge=1)

    @field_validator("training")
    @classmethod
    def _no_varied_field(cls, value: dict[str, Any]) -> dict[str, Any]:
        if "seed" in value or "norm" in value.get("model", {}):
            raise ValueError("the norm and the seed are varied by the table, not set by a preset")
        return value


class NormRun(Run):
    """A classifier with one of `NORMS`, trained with one seed."""

    workload: ClassVar[ClassificationWorkload] = ClassificationWorkload()
    kind: Literal["rmsnorm"] = "rmsnorm"
    evaluation: ClassifySettings

    def stages(self, paths: RunPaths) -> list[Stage]:
        """Train, looking at the development set, then classify the test set.

        The threshold is tuned on the development set.
        """
        config, settings = self.training_config, self.evaluation

        def probes(data: RelationData) -> list[DevelopmentProbe]:
            return [DevelopmentProbe(data, settings.every, config.precision)]

        def cost() -> Cost:
            tokens = GUESSED_DOCUMENTS * NOMINAL_LENGTH
            flops = stack_flops(config.model, NOMINAL_LENGTH).forward
            return Cost(scored=tokens, flops=tokens * flops)

        def classify(data: RelationData, note: Note) -> pl.DataFrame:
            model = load_as(Classifier, paths.run / MODEL, config.model)
            return evaluate_classifier(
                model.to(choose_device(config.device)),
                data,
                self.identity(CLASSIFIED),
                precision=config.precision,
                max_tokens=settings.max_tokens,
                progress=lambda done, total: note(done, total, "documents"),
            )

        return [
            training_stage(self.workload, config, paths.run, probes=probes),
            measuring_stage(paths.run, CLASSIFIED, classify, cost),
        ]


class TimeRun(Run):
    """Optimiser steps of models with each of `norms` in turn, on the same batches.

    A round is a unit: its steps are of one batch, one after the other in one process, so that
    norms are paired over the rounds.
    """

    workload: ClassVar[ClassificationWorkload] = ClassificationWorkload()
    kind: Literal["rmsnorm-time"] = "rmsnorm-time"
    norms: tuple[str, ...]
    timing: TimingSettings

    @property
    def readings(self) -> int:
        """No row of the table."""
        return 0

    def stages(self, paths: RunPaths) -> list[Stage]:
        """Time them: every token of every step counts as scored, three times the work."""
        first, rounds = self.training_config, self.timing.rounds

        def config(norm: str) -> ClassificationConfig:
            fields = merged(self.training, {"seed": self.seed, "model.norm": NORMS[norm]})
            return ClassificationConfig.parse(fields, f"the settings of {norm}")

        def cost() -> Cost:
            costs = [self.workload.cost(config(norm)) for norm in self.norms]
            steps = (rounds + WARM) / first.steps
            tokens = sum(cost.trained for cost in costs)
            return Cost(
                scored=round(3 * steps * tokens), flops=steps * sum(cost.flops for cost in costs)
            )

        def measure(data: RelationData, note: Note) -> pl.DataFrame:
            with world(first.device) as process, threads(first.threads):
                timings = interleave(
                    {norm: _step(config(norm), data, process) for norm in self.norms},
                    rounds,
                    warm=WARM,
                    device=process.device.type,
                    least_seconds=0.0,
                    on_round=lambda done: note(done, rounds, "rounds"),
                )
            count = f"{first.threads} thread{'s' * (first.threads > 1)}"
            said = f"{first.batch_size} documents, {first.precision}, {process.device.type}"
            whose = replace(self.identity(STEP_TIME), settings=f"{said}, {count}")
            return joined(
                timed(replace(whose, row=norm, score=norm), timing.rounds)
                for norm, timing in timings.items()
            )

        return [measuring_stage(paths.run, STEP_TIME, measure, cost, phase="timing")]


def timed(identity: Identity, rounds: Sequence[float]) -> pl.DataFrame:
    """Seconds of a step in every round."""
    names = [f"round {number:04}" for number in range(len(rounds))]
    seconds = np.asarray(rounds)
    return identified(identity, [sums("step_time", names, seconds, np.ones(len(seconds)))])


def _step(config: ClassificationConfig, data: RelationData, process: World) -> Callable[[], object]:
    """One more optimiser step at each call."""
    task = ClassificationWorkload().task(config, data, process.device, config.accumulate)
    # The rounds are not a training: no number of steps ends them.
    stepper = TrainStep(task, config, process, lambda: False)
    done = 0

    def step() -> object:
        nonlocal done
        done = done % config.steps + 1
        return stepper.step(done)

    return step


def resolve(request: Request) -> Sweep:
    """The study that a request asks for; `--variants` choose among LayerNorm and RMSNorm.

    Raises `InputError` for settings that cannot be, an unknown norm, data that is missing or
    damaged, and where torchmetrics is not installed.
    """
    preset = opened_as(request, "rmsnorm", RMSNormPreset)
    request.refuse_choices("rmsnorm")
    check_metrics()
    training = _shared(preset)
    norms, seeds = _norms(request.variants), request.seeds_or(preset.seeds)
    trained = {norm: merged(training, {"model.norm": NORMS[norm]}) for norm in norms}
    runs: list[Run] = [
        NormRun(variant=norm, seed=seed, training=trained[norm], evaluation=preset.evaluation)
        for seed in seeds
        for norm in norms
    ]
    if len(norms) > 1:
        first = trained[norms[0]]
        runs.append(
            TimeRun(variant=TIMED, seed=0, training=first, norms=norms, timing=preset.timing)
        )
    model = runs[0].training_config.model
    config = SweepConfig.of(
        preset.name,
        training=training,
        evaluation=preset.evaluation,
        timing=preset.timing,
    )
    facts = (
        ("model", f"{model.layers} layers of width {model.dim}, {model.labels} labels"),
        ("norms", f"{', '.join(norms)}; seeds {', '.join(map(str, seeds))}"),
    )
    return Sweep.of(request, "rmsnorm", config, runs, describe=_describe, facts=facts)


def _norms(asked: Sequence[str] | None) -> tuple[str, ...]:
    known = {name.lower(): name for name in NORMS}
    for name in asked or NORMS:
        if name.lower() not in known:
            raise InputError(f"there is no norm {name!r} here; there are {', '.join(NORMS)}")
    return tuple(dict.fromkeys(known[name.lower()] for name in asked or NORMS))


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


def _describe(run: Run, data: RelationData) -> list[str]:
    if not isinstance(run, NormRun):
        return []
    config = run.training_config
    run.workload.check(config, data, config.accumulate)
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


def as_it_went(whose: Identity, run: Path) -> pl.DataFrame:
    """What a training in the directory `run` left besides its loss: looks, and its time."""
    looks = [
        sums(name, [""], [[line[name]]], [[1.0]], axis="step", edges=[float(line["step"])])
        for line in read_metrics(run / "development.jsonl")
        for name in ("loss", "micro_f1", "macro_f1")
    ]
    parts = []
    if looks:
        parts.append(identified(replace(whose, protocol=DEVELOPMENT, split="validation"), looks))
    lines = read_metrics(run / "metrics.jsonl")
    last = int(lines[-1]["step"]) if lines else 0
    seconds = whole_time(read_metrics(run / "timing.jsonl"), last)
    if seconds is not None:
        parts.append(identified(whose, [fact("training_seconds", seconds)]))
    return joined(parts)


def whole_time(lines: Sequence[dict[str, Any]], steps: int) -> float | None:
    """Seconds of all steps at the mean pace; the clock of a resumed training starts at 0 again.

    With everything that a step brings (looks at the development set, checkpoints); None where it
    was too short to know.
    """
    seconds = done = 0.0
    before: dict[str, Any] = {"step": 0, "seconds": 0.0}
    for line in lines:
        if line["seconds"] >= before["seconds"] and line["step"] >= before["step"]:
            seconds += line["seconds"] - before["seconds"]
            done += line["step"] - before["step"]
        before = line
    return seconds / done * steps if done else None
