"""What the norm study measures: the test set, the time of a step, the trainings as they went."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from pydantic import Field

from normattn.lab.data.relations import RelationData
from normattn.lab.evaluation.classification import evaluate_classifier
from normattn.lab.runs import read_metrics
from normattn.lab.runs.timing import interleave, threads
from normattn.lab.stats import Identity, fact, identified, joined, sums
from normattn.lab.sweep.collect import history
from normattn.lab.sweep.stages import MeasureStage, Note
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

CLASSIFIED, STEP_TIME, DEVELOPMENT = "classification", "step time", "development"
"""The protocols; the first two are also the names of their frames."""
CURVES = ("loss", "micro_f1", "macro_f1")
"""What is noted of the development set while training."""
# Documents of data that has not been read yet, for the plan.
_GUESSED_DOCUMENTS = 1000
_WARM = 3


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


@dataclass(frozen=True)
class ClassifyStage(MeasureStage):
    """Tune the threshold of the model in `place` on the development set, classify the test set."""

    phase = "evaluation"
    frame = CLASSIFIED
    config: ClassificationConfig
    identity: Identity
    settings: ClassifySettings

    @property
    def cost(self) -> Cost:
        """Unknown before the documents are read: as of a thousand of them."""
        tokens = _GUESSED_DOCUMENTS * NOMINAL_LENGTH
        flops = tokens * stack_flops(self.config.model, NOMINAL_LENGTH).forward
        return Cost(scored=tokens, flops=flops)

    def measured(self, data: RelationData, note: Note) -> pl.DataFrame:
        """Every document of the test set."""
        model = load_as(Classifier, self.folder / MODEL, self.config.model).to(
            choose_device(self.config.device)
        )
        return evaluate_classifier(
            model,
            data,
            self.identity,
            precision=self.config.precision,
            max_tokens=self.settings.max_tokens,
            progress=lambda done, total: note(done, total, "documents"),
        )


@dataclass(frozen=True)
class TimeStage(MeasureStage):
    """Time optimiser steps of models with different norms in turn, on the same batches.

    A round is a unit: its steps are of one batch, one after the other in one process, so that
    norms are paired over the rounds. `identities` are those of the `configs`, by norm.
    """

    phase = "timing"
    frame = STEP_TIME
    configs: Mapping[str, ClassificationConfig]
    identities: Mapping[str, Identity]
    settings: TimingSettings

    @property
    def cost(self) -> Cost:
        """Every token of every timed step, counted as scored: three times the work."""
        costs = [ClassificationWorkload().cost(config) for config in self.configs.values()]
        steps = self.settings.rounds + _WARM
        flops = sum(c.flops / g.steps for c, g in zip(costs, self.configs.values(), strict=True))
        tokens = sum(c.trained / g.steps for c, g in zip(costs, self.configs.values(), strict=True))
        return Cost(scored=round(3 * steps * tokens), flops=steps * flops)

    def measured(self, data: RelationData, note: Note) -> pl.DataFrame:
        """Every round."""
        first = next(iter(self.configs.values()))
        rounds = self.settings.rounds
        with world(first.device) as process, threads(first.threads):
            steps = {norm: _step(config, data, process) for norm, config in self.configs.items()}
            timings = interleave(
                steps,
                rounds,
                warm=_WARM,
                device=process.device.type,
                least_seconds=0.0,
                on_round=lambda done: note(done, rounds, "rounds"),
            )
        count = f"{first.threads} thread{'s' * (first.threads > 1)}"
        said = f"{first.batch_size} documents, {first.precision}, {process.device.type}, {count}"
        return joined(
            timed(replace(self.identities[norm], settings=said), timing.rounds)
            for norm, timing in timings.items()
        )


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


def training(identity: Identity, run: Path) -> pl.DataFrame:
    """The training in the directory `run` as it went: its loss, the development set, its time."""
    looks = [
        sums(name, [""], [[line[name]]], [[1.0]], axis="step", edges=[float(line["step"])])
        for line in read_metrics(run / "development.jsonl")
        for name in CURVES
    ]
    parts = [history(run, identity.row, identity.seed)]
    if looks:
        at = replace(identity, protocol=DEVELOPMENT, split="validation")
        parts.append(identified(at, looks))
    seconds = whole_time(read_metrics(run / "timing.jsonl"), last_step(run))
    if seconds is not None:
        at = replace(identity, protocol="training", split="train")
        parts.append(identified(at, [fact("training_seconds", seconds)]))
    return joined(parts)


def last_step(run: Path) -> int:
    """The last step that is noted of a training; 0 where there is none."""
    lines = read_metrics(run / "metrics.jsonl")
    return int(lines[-1]["step"]) if lines else 0


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
