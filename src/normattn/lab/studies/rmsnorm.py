"""What does RMSNorm save against LayerNorm, and what does it cost? (relation classification)

The source's claim is that RMSNorm costs a little F1 and saves a little time. Both norms are
trained with the same seeds, batches and settings; the time of a step is measured with the steps of
both in turn, in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import cycle
from math import exp
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import polars as pl
from pydantic import Field

from normattn.errors import unknown_name
from normattn.lab.data.relations import RelationConfig, RelationData, prepare_relations
from normattn.lab.evaluation.classification import evaluate_classifier
from normattn.lab.report.claims import SEEDS, Claim
from normattn.lab.report.figures import Curves, Figure, Line, Panel
from normattn.lab.report.tables import Column, Row, Table, text_column
from normattn.lab.report.view import View, step_points
from normattn.lab.runs.environment import threads
from normattn.lab.runs.timing import interleave
from normattn.lab.stats import (
    Estimate,
    Identity,
    Metric,
    Sums,
    identified,
    joined,
    of_seeds,
    select,
    sums,
)
from normattn.lab.stats.metrics import MACRO_F1, MICRO_F1, mean, median, ratio
from normattn.lab.studies.base import Study
from normattn.lab.studies.lm_report import ranked
from normattn.lab.studies.preset import StudyPreset, opened
from normattn.lab.sweep.config import SweepConfig, merged
from normattn.lab.sweep.paths import RunPaths
from normattn.lab.sweep.run import MeasuredRun, Note, Request, Run, Stage, Sweep
from normattn.lab.training.distributed import World, world
from normattn.lab.training.planning import Cost
from normattn.lab.training.step import TrainStep
from normattn.lab.training.tasks.classification import (
    NOMINAL_LENGTH,
    ClassificationConfig,
)
from normattn.models.flops import stack_flops
from normattn.settings import Settings

LAYER, RMS = "LayerNorm", "RMSNorm"
NORMS = {LAYER: "layer", RMS: "rms"}
"""The rows of the table, and the model's setting of each."""
TIMED = "step time"
"""The variant, and the directory, of the run that times the steps."""
CLASSIFIED, STEP_TIME = "classification", "step time"
"""The protocols, which are also the names of their records."""
GUESSED_DOCUMENTS = 1000
"""Documents of data that has not been read yet, for the plan."""
WARM = 3
"""Steps of each norm before its time is taken."""

# Preset and runs


class ClassifySettings(Settings):
    """`max_tokens` of documents are read at once (memory, never a result)."""

    max_tokens: int = Field(default=16384, ge=1)


class TimingSettings(Settings):
    """A step of each norm is timed once in each of `rounds`."""

    rounds: int = Field(default=30, ge=2)


class RMSNormPreset(StudyPreset):
    """One setting of the study; `training` holds fields of `ClassificationConfig`.

    The number of labels is that of the data.
    """

    varied: ClassVar[Mapping[str, Any]] = {"model.norm": "layer"}

    evaluation: ClassifySettings = ClassifySettings()
    timing: TimingSettings = TimingSettings()
    seeds: int = Field(default=3, ge=1)


class NormRun(MeasuredRun):
    """A classifier with one of `NORMS`, trained with one seed."""

    training_class: ClassVar[type[ClassificationConfig]] = ClassificationConfig
    record = CLASSIFIED
    kind: Literal["rmsnorm"] = "rmsnorm"
    evaluation: ClassifySettings

    def cost(self, config: ClassificationConfig) -> Cost:
        """Unknown before the data is read: as of documents of a nominal length."""
        tokens = GUESSED_DOCUMENTS * NOMINAL_LENGTH
        return Cost(scored=tokens, flops=tokens * stack_flops(config.model, NOMINAL_LENGTH).forward)

    def measure(
        self, folder: Path, config: ClassificationConfig, data: RelationData, note: Note
    ) -> pl.DataFrame:
        """Tune the threshold on the development set, then classify the test set."""
        return evaluate_classifier(
            self.model_in(folder, config),
            data,
            self.identity(CLASSIFIED),
            precision=config.precision,
            max_tokens=self.evaluation.max_tokens,
            progress=lambda done, total: note(done, total, "documents"),
        )


class TimeRun(MeasuredRun):
    """Optimiser steps of models with each of `norms` in turn, on the same batches.

    A round is a unit: its steps are of one batch, one after the other in one process, so that
    norms are paired over the rounds.
    """

    training_class: ClassVar[type[ClassificationConfig]] = ClassificationConfig
    record, phase = STEP_TIME, "timing"
    kind: Literal["rmsnorm-time"] = "rmsnorm-time"
    norms: tuple[str, ...]
    timing: TimingSettings

    @property
    def readings(self) -> int:
        """No row of the table."""
        return 0

    def stages(self, paths: RunPaths) -> list[Stage]:
        """Measure; nothing is trained."""
        return [self.measuring(paths.run, self.training_config)]

    def _configs(self, first: ClassificationConfig) -> dict[str, ClassificationConfig]:
        model = {norm: first.model.model_copy(update={"norm": NORMS[norm]}) for norm in self.norms}
        return {norm: first.model_copy(update={"model": own}) for norm, own in model.items()}

    def cost(self, config: ClassificationConfig) -> Cost:
        """Each token of the steps counts as scored, three times the work."""
        costs = [own.cost() for own in self._configs(config).values()]
        share = (self.timing.rounds + WARM) / config.steps
        return Cost(
            scored=round(3 * share * sum(cost.trained for cost in costs)),
            flops=share * sum(cost.flops for cost in costs),
        )

    def measure(
        self, folder: Path, config: ClassificationConfig, data: RelationData, note: Note
    ) -> pl.DataFrame:
        """Time the steps of all norms in turn."""
        rounds = self.timing.rounds
        with world(config.device) as process, threads(config.threads):
            steps = {norm: _stepper(c, data, process) for norm, c in self._configs(config).items()}
            timings = interleave(
                steps,
                rounds,
                warm=WARM,
                device=process.device.type,
                least_seconds=0.0,
                on_round=lambda done: note(done, rounds, "rounds"),
            )
        count = f"{config.threads} thread{'s' * (config.threads > 1)}"
        made = f"{config.batch_size} documents, {config.precision}, {process.device.type}, {count}"
        whose = self.identity(STEP_TIME, settings=made)
        return joined(
            timed(replace(whose, row=norm, score=norm), timing.rounds)
            for norm, timing in timings.items()
        )


def timed(whose: Identity, rounds: Sequence[float]) -> pl.DataFrame:
    """Seconds of a step in every round."""
    names = [f"round {number:04}" for number in range(len(rounds))]
    seconds = np.asarray(rounds)
    return identified(whose, [sums("step_time", names, seconds, np.ones(len(seconds)))])


def _stepper(
    config: ClassificationConfig, data: RelationData, process: World
) -> Callable[[], object]:
    """One more optimiser step at each call; no number of steps ends them."""
    task = config.task(data, process.device, config.accumulate)
    stepper, numbers = TrainStep(task, config, process, lambda: False), cycle(range(config.steps))
    return lambda: stepper.step(next(numbers) + 1)


def resolve(request: Request) -> Sweep:
    """The study that a request asks for; `--variants` choose among LayerNorm and RMSNorm.

    Raises `InputError` for settings that cannot be, an unknown norm, and data that is missing or
    damaged.
    """
    preset = opened(request, "rmsnorm", RMSNormPreset)
    norms, seeds = _chosen(request.variants or tuple(NORMS)), request.seeds_or(preset.seeds)
    training = _shared(preset)
    own = {norm: merged(training, {"model.norm": NORMS[norm]}) for norm in norms}
    runs: list[Run] = [
        NormRun(variant=norm, seed=seed, training=own[norm], evaluation=preset.evaluation)
        for seed in seeds
        for norm in norms
    ]
    if len(norms) > 1:
        first = own[norms[0]]
        runs.append(
            TimeRun(variant=TIMED, seed=0, training=first, norms=norms, timing=preset.timing)
        )
    config = SweepConfig.of(
        preset.name, training=training, evaluation=preset.evaluation, timing=preset.timing
    )
    return Sweep.of(request, "rmsnorm", config, runs, describe=_describe)


def _chosen(asked: Sequence[str]) -> tuple[str, ...]:
    known = {name.lower(): name for name in NORMS}
    for name in asked:
        if name.lower() not in known:
            raise unknown_name("norm", name, NORMS)
    return tuple(dict.fromkeys(known[name.lower()] for name in asked))


def _shared(preset: RMSNormPreset) -> dict[str, Any]:
    """The training settings of both norms; the number of labels is that of the data."""
    labels, fields = {}, preset.training
    if "labels" not in fields.get("model", {}):
        subject = f"preset {preset.name}, training.data"
        data = RelationConfig.parse(fields.get("data", {}), subject)
        count = data.modules if data.embedded else len(prepare_relations(data).labels)
        labels = {"model.labels": count}
    return preset.whole_training(ClassificationConfig, labels)


def _describe(run: Run, data: RelationData) -> list[str]:
    """How many documents there are, and how many are cut."""
    if not isinstance(run, NormRun):
        return []
    config = run.training_config
    config.check(data, config.accumulate)
    counts = " / ".join(f"{len(split):,}" for split in data)
    return [
        f"corpus {config.data.corpus}: {counts} documents to train, tune and test on, "
        f"{len(data.labels)} labels; {sum(split.cut for split in data):,} are cut behind "
        f"{config.data.max_tokens} of {data.pieces.vocab_size:,} word pieces"
    ]


# Columns

SOURCE = "the source, NYT24"
PUBLISHED = {LAYER: 95.85, RMS: 95.59}
"""The F1 (%) that the source reports for NYT24, with 7.92M parameters."""
LOST = PUBLISHED[LAYER] - PUBLISHED[RMS]
SAVED = 100 * (1 - 215.0 / 231.0)
"""The share of time (%) that RMSNorm saves there: seconds of training."""
EARLY = 0.1
"""The share of the steps that counts as early in a training."""
LOSS = Metric("loss", "loss, mnats", ratio(1000.0), "mnats", 2)
# A median is of the rounds themselves: each is a bin of its own.
STEP = Metric("step_time", "step, ms", median(1000.0), "ms", 1).between(Sums.by_unit)
TESTS, TRAININGS, STEPS = ({"protocol": name} for name in (CLASSIFIED, "training", STEP_TIME))


def norms(view: View) -> list[str]:
    """The norms that were trained, LayerNorm first."""
    return ranked(view.values("row"), (LAYER, RMS))


COLUMNS = (
    Column("micro_f1", "micro F1, %", MICRO_F1.at(TESTS)),
    Column("macro_f1", "macro F1, %", MACRO_F1.at(TESTS)),
    Column("loss", LOSS.title, LOSS.at(TESTS)),
    Column("parameters", "parameters", mean("parameters", "", 0).at(TRAININGS), interval=False),
    Column("step_ms", STEP.title, STEP.at(STEPS)),
    text_column("source_f1", "source: F1, %", lambda view, row: f"{PUBLISHED[row.label]:.2f}"),
)


def _notes(view: View) -> Sequence[str]:
    labels = len(view.values("bin", {**TESTS, "statistic": MICRO_F1.name}))
    documents, rounds = (len(view.values("unit", where)) for where in (TESTS, STEPS))
    return (
        f"Which of {labels} labels a document has; {documents:,} test documents.",
        "micro F1: of all labels together; macro F1: the mean over the labels that are true or "
        "predicted anywhere in the test set. Of several seeds the mean of theirs.",
        "loss: binary cross-entropy on the test set, the mean over documents and labels, in "
        "thousandths of a nat.",
        "source: what the source reports for NYT24, on another machine: not measured here.",
        *(
            f"step: median of an optimiser step ({made}), both norms in turn in one process, "
            f"{rounds} rounds on the same batches; intervals over the rounds."
            for made in view.values("settings", STEPS)[:1]
        ),
    )


# Claims


def claims(view: View) -> Iterator[Claim]:
    """A little F1 lost, 7 % of the time saved, a higher loss early in training."""
    for metric, name in ((MICRO_F1, "micro F1"), (MACRO_F1, "macro F1")):
        yield Claim(
            f"RMSNorm costs a little F1 ({LOST:.2f} points)",
            _change(metric),
            *(SOURCE, f"{RMS} − {LAYER}, {name} in points"),
            sign=-1,
            matters=LOST,
        )
    yield Claim(
        "RMSNorm costs a little, whatever the threshold: its test loss is higher",
        _change(LOSS),
        *("asked here", f"{RMS} − {LAYER}, test loss in thousandths of a nat"),
    )
    yield Claim(
        f"RMSNorm saves time ({SAVED:.0f} %)",
        None,
        SOURCE,
        "RMSNorm to LayerNorm, median time of a step, change in %, paired over rounds",
        sign=-1,
        matters=SAVED,
        test=step_change,
        digits=1,
    )
    yield Claim(
        "RMSNorm's loss is higher early in training",
        None,
        SOURCE,
        f"RMSNorm − LayerNorm, training loss of the first {EARLY:.0%} of the steps in "
        "thousandths of a nat, paired over seeds",
        test=early_difference,
        digits=2,
    )


def _change(metric: Metric) -> Metric:
    """RMSNorm − LayerNorm on the test set, paired over documents and seeds."""
    return metric.at(TESTS, variant=RMS) - metric.at(TESTS, variant=LAYER)


def step_change(view: View) -> Estimate | None:
    """By how many % a step with RMSNorm takes longer: the ratio of medians, rounds as pairs.

    The interval is that of the ratio's logarithm. Rounds vary here, not trainings: no number of
    seeds stands behind it.
    """
    logarithm = Metric("step_time", value=lambda *sums: np.log(median()(*sums)))
    of_row = logarithm.between(Sums.by_unit).at(STEPS)
    value = view.known(of_row.at(row=RMS) - of_row.at(row=LAYER))
    if value is None:
        return None
    low, high = (None if end is None else _percent(end) for end in (value.low, value.high))
    return Estimate(_percent(value.value), low, high, value.p, value.units)


def early_difference(view: View) -> Estimate | None:
    """Training loss of the first `EARLY` of the steps, in thousandths of a nat.

    Both norms had the same batches, so that seeds are pairs; fewer than `SEEDS` have no p.
    """
    means: list[dict[int, float]] = []
    for row in (RMS, LAYER):
        losses = select(view.frame, {**TRAININGS, "row": row, "statistic": "loss", "axis": "step"})
        early = losses.filter(pl.col("bin") <= (EARLY * pl.col("bin").max()).clip(lower_bound=1))
        added = early.group_by("seed").agg(pl.col("sum", "of").sum())
        means.append({seed: 1000 * above / below for seed, above, below in added.rows() if below})
    ours, other = means
    changes = {seed: ours[seed] - other[seed] for seed in sorted(ours.keys() & other.keys())}
    if not changes:
        return None
    change = of_seeds(changes, view.bootstrap.level)
    return change if len(changes) >= SEEDS else replace(change, p=None)


def _percent(log_ratio: float) -> float:
    return round(100 * (exp(log_ratio) - 1), 7) + 0.0


# Figure and study


def figures(view: View) -> list[Figure]:
    """The training loss by step."""
    curves = {norm: step_points(view, "loss", {"row": norm}) for norm in norms(view)}
    lines = tuple(Line(norm, points, norm) for norm, points in curves.items() if points)
    panel = Panel("", lines, "optimiser step", "nats")
    return [Curves("training", "Training loss: means, bands of all seeds", (panel,))]


STUDY = Study(
    "rmsnorm",
    "What does RMSNorm save against LayerNorm, and what does it cost?",
    title="LayerNorm against RMSNorm",
    help="Train a multi-label classifier with each norm, and time the training steps in turn.\n\n"
    "To add seeds, rerun with other --seeds and the same OUT. Changing any other setting that "
    "affects a result raises an error.",
    sources=("F1 0.9585 with LayerNorm and 0.9559 with RMSNorm, 231 s and 215 s (NYT24)",),
    resolve=resolve,
    runs=(NormRun, TimeRun),
    tables=(
        Table(
            "table",
            "",
            lambda view: [Row(norm, {"row": norm}) for norm in norms(view)],
            COLUMNS,
            intro="A classifier of relations, several labels to a document.",
            notes=_notes,
            head="norm",
        ),
    ),
    claims=claims,
    figures=figures,
    variants_help="LayerNorm, RMSNorm, or both, separated by a comma. [default: both]",
    examples=(("--corpus FOLDER", "your own documents, in the form of NYT24"),),
)
