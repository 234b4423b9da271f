"""The steps of the norm study's cells after training: classify the test set, time both norms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field

from normattn.data.relations import RelationData
from normattn.evaluation.classification import evaluate_classifier
from normattn.models.accounting import stack_flops
from normattn.models.classifier import Classifier
from normattn.models.pretrained import load_as
from normattn.reports.classification_record import write_classification
from normattn.reports.rmsnorm_records import StepTimes, write_step_times
from normattn.runs.timing import interleave, threads
from normattn.sweep.settings import Settings
from normattn.sweep.stages import Note, Stage
from normattn.training.classification import (
    NOMINAL_LENGTH,
    ClassificationConfig,
    ClassificationWorkload,
)
from normattn.training.distribution import World, choose_device, world
from normattn.training.step import Stepper
from normattn.training.workload import MODEL, Cost

RECORD, STEP_TIME = "classification.json", "step_time.json"
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
class ClassifyStage(Stage):
    """Tune the threshold of the model in `place` on the development set, classify the test set."""

    phase = "evaluation"
    config: ClassificationConfig
    place: Path
    variant: str
    settings: ClassifySettings

    @property
    def cost(self) -> Cost:
        """Unknown before the documents are read: as of a thousand of them."""
        tokens = _GUESSED_DOCUMENTS * NOMINAL_LENGTH
        flops = tokens * stack_flops(self.config.model, NOMINAL_LENGTH).forward
        return Cost(scored=tokens, flops=flops)

    def is_done(self) -> bool:
        """Whether the record is there."""
        return (self.place / RECORD).is_file()

    def run(self, data: RelationData, note: Note) -> str | None:
        """Classify, unless it is on record."""
        if self.is_done():
            return None
        model = load_as(Classifier, self.place / MODEL, self.config.model).to(
            choose_device(self.config.device)
        )
        record = evaluate_classifier(
            model,
            data,
            variant=self.variant,
            seed=self.config.seed,
            precision=self.config.precision,
            max_tokens=self.settings.max_tokens,
            progress=lambda done, total: note(done, total, "documents"),
        )
        write_classification(self.place / RECORD, record)
        return None


@dataclass(frozen=True)
class TimeStage(Stage):
    """Time optimiser steps of models with different norms in turn, on the same batches."""

    phase = "timing"
    configs: Mapping[str, ClassificationConfig]
    place: Path
    settings: TimingSettings

    @property
    def cost(self) -> Cost:
        """Every token of every timed step, counted as scored: three times the work."""
        each = [ClassificationWorkload().cost(config) for config in self.configs.values()]
        steps = self.settings.rounds + _WARM
        flops = sum(c.flops / g.steps for c, g in zip(each, self.configs.values(), strict=True))
        tokens = sum(c.trained / g.steps for c, g in zip(each, self.configs.values(), strict=True))
        return Cost(scored=round(3 * steps * tokens), flops=steps * flops)

    def is_done(self) -> bool:
        """Whether the times are there."""
        return (self.place / STEP_TIME).is_file()

    def run(self, data: RelationData, note: Note) -> str | None:
        """Time them, unless they are on record."""
        if self.is_done():
            return None
        first = next(iter(self.configs.values()))
        rounds = self.settings.rounds
        with world(first.device) as place, threads(first.threads):
            steps = {norm: _step(config, data, place) for norm, config in self.configs.items()}
            timings = interleave(
                steps,
                rounds,
                warm=_WARM,
                device=place.device.type,
                least_seconds=0.0,
                on_round=lambda done: note(done, rounds, "rounds"),
            )
        found = {norm: timing.rounds for norm, timing in timings.items()}
        record = StepTimes(
            seconds=found,
            device=place.device.type,
            threads=first.threads,
            batch_size=first.batch_size,
            precision=first.precision,
        )
        write_step_times(self.place / STEP_TIME, record)
        return None


def _step(config: ClassificationConfig, data: RelationData, place: World) -> Callable[[], object]:
    """One more optimiser step at each call."""
    task = ClassificationWorkload().task(config, data, place.device, config.accumulate)
    # The rounds are not a training: no number of steps ends them.
    stepper = Stepper(task, config, place, lambda: False)
    done = 0

    def step() -> object:
        nonlocal done
        done = done % config.steps + 1
        return stepper.step(done)

    return step
