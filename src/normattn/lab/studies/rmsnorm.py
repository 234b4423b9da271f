"""What does RMSNorm save against LayerNorm, and what does it cost? (relation classification)

The source's claim is that RMSNorm costs a little F1 and saves a little time. Both norms are
trained with the same seeds, batches and settings; the time of a step is measured with the steps of
both in turn, in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import exp, log
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
from normattn.lab.report.claim import SEEDS, Claim
from normattn.lab.report.figure import Curves, Figure, Line, Panel, Point
from normattn.lab.report.points import step_points
from normattn.lab.report.table import (
    NOTHING,
    Cell,
    Column,
    Row,
    Table,
    estimate_column,
    shown,
    text_column,
)
from normattn.lab.report.view import View
from normattn.lab.runs import read_metrics
from normattn.lab.runs.timing import interleave, threads
from normattn.lab.stats import (
    Estimate,
    Identity,
    Metric,
    contrast,
    estimate,
    fact,
    identified,
    joined,
    of_seeds,
    select,
    sums,
)
from normattn.lab.stats.metrics import MACRO_F1, MICRO_F1, mean, median, ratio
from normattn.lab.studies.base import Study
from normattn.lab.studies.lm_report import ranked
from normattn.lab.studies.preset import StudyPreset, opened_as
from normattn.lab.sweep.collect import of_trainings
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


def _as_it_went(whose: Identity, run: Path) -> pl.DataFrame:
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


# Columns

SOURCE = "the source, NYT24"
PUBLISHED: Mapping[str, tuple[float, float]] = {LAYER: (95.85, 231.0), RMS: (95.59, 215.0)}
"""What the source reports for NYT24 with 7.92M parameters: F1 in %, seconds of training."""
SAVED = 100 * (1 - PUBLISHED[RMS][1] / PUBLISHED[LAYER][1])
"""The share of time that RMSNorm saves there, in %."""
LOST = PUBLISHED[LAYER][0] - PUBLISHED[RMS][0]
EARLY = 0.1
"""The share of the steps that counts as early in a training."""
LOSS = Metric("loss", "loss, mnats", ratio(1000.0), "mnats", 2)
STEP = Metric("step_time", "step, ms", median(1000.0), "ms", 1)
PARAMETERS = mean("parameters", "parameters", 0)
SECONDS = mean("training_seconds", "training, s", 0)
OF_TESTS, OF_TRAININGS, OF_STEPS = (
    {"protocol": name} for name in (CLASSIFIED, "training", STEP_TIME)
)


def norms(view: View) -> list[str]:
    """The norms that were trained, LayerNorm first."""
    return ranked(view.values("row"), (LAYER, RMS))


def _threshold(view: View, row: Row) -> Cell:
    """From the lowest to the highest seed's."""
    threshold = view.estimate(mean("threshold", "threshold"), {**row.where, **OF_TRAININGS})
    if threshold is None:
        return NOTHING
    ends = sorted({min(threshold.per_seed), max(threshold.per_seed)})
    return Cell(" to ".join(f"{end:.2f}" for end in ends), threshold)


def _median_step(view: View, row: Row) -> Estimate | None:
    """The median of the rounds."""
    rounds = view.sums(STEP.name, {**row.where, **OF_STEPS})
    return None if rounds is None else estimate(rounds.by_unit(), STEP, view.bootstrap)


COLUMNS = (
    Column("micro_f1", "micro F1, %", MICRO_F1.at(OF_TESTS)),
    Column("macro_f1", "macro F1, %", MACRO_F1.at(OF_TESTS)),
    Column("loss", LOSS.title, LOSS.at(OF_TESTS)),
    Column("threshold", "threshold", plain=_threshold),
    Column("parameters", "parameters", PARAMETERS.at(OF_TRAININGS), interval=False),
    estimate_column("step_ms", STEP.title, _median_step, lambda value: shown(value, STEP.digits)),
    Column("training_seconds", SECONDS.title, SECONDS.at(OF_TRAININGS), interval=False),
    text_column("source_f1", "source: F1, %", lambda view, row: f"{PUBLISHED[row.label][0]:.2f}"),
    text_column("source_seconds", "source: s", lambda view, row: f"{PUBLISHED[row.label][1]:.0f}"),
)


def _notes(view: View) -> Sequence[str]:
    said = [words for words in view.values("settings", OF_STEPS) if words]
    rounds = len(view.values("unit", OF_STEPS))
    labels = len(view.values("bin", {**OF_TESTS, "statistic": MICRO_F1.name}))
    documents = len(view.values("unit", OF_TESTS))
    return (
        f"Which of {labels} labels a document has; {documents:,} test documents.",
        "micro F1: of all labels together; macro F1: the mean over the labels that are true or "
        "predicted anywhere in the test set. Of several seeds the mean of theirs; torchmetrics' "
        "values of each seed stand in the measurements.",
        "loss: binary cross-entropy on the test set, the mean over documents and labels, in "
        "thousandths of a nat.",
        "threshold: what a label's probability must reach; tuned on the development set alone, "
        "for each seed; from the lowest to the highest.",
        "training: seconds of a whole training as it ran here, beside other work, with looks at "
        "the development set; the mean over seeds.",
        "source: what the source reports for NYT24, on another machine: not measured here.",
        *(
            f"step: median of an optimiser step ({words}), both norms in turn in one process, "
            f"{rounds} rounds on the same batches; intervals over the rounds."
            for words in said[:1]
        ),
    )


# Claims


def claims(view: View) -> Iterator[Claim]:
    """A little F1 lost, 7 % of the time saved, a higher loss early in training."""
    costs = f"RMSNorm costs a little F1 ({LOST:.2f} points)"
    for metric, words in ((MICRO_F1, "micro F1 in points"), (MACRO_F1, "macro F1 in points")):
        yield Claim(
            costs, _change(metric), SOURCE, f"{RMS} − {LAYER}, {words}", sign=-1, matters=LOST
        )
    yield Claim(
        "RMSNorm costs a little, whatever the threshold: its test loss is higher",
        _change(LOSS),
        "asked here",
        f"{RMS} − {LAYER}, test loss in thousandths of a nat",
    )
    saves = partial(Claim, f"RMSNorm saves time ({SAVED:.0f} %)", None, SOURCE, sign=-1, digits=1)
    yield saves(
        "RMSNorm to LayerNorm, median time of a step, change in %, paired over rounds",
        test=step_change,
        matters=SAVED,
    )
    yield saves(
        "RMSNorm to LayerNorm, time of whole trainings, change in % (beside other work, so "
        "without an interval)",
        test=training_change,
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
    tested = metric.at(OF_TESTS)
    return tested.at(variant=RMS) - tested.at(variant=LAYER)


def step_change(view: View) -> Estimate | None:
    """By how many % a step with RMSNorm takes longer: the ratio of medians, rounds as pairs.

    The interval is that of the ratio's logarithm.
    """
    ours, other = (view.sums(STEP.name, {"row": row, **OF_STEPS}) for row in (RMS, LAYER))
    if ours is None or other is None:
        return None
    value = contrast(
        [(1.0, ours.by_unit()), (-1.0, other.by_unit())],
        lambda *both: np.log(STEP.value(*both)),
        view.bootstrap,
    )
    # Rounds vary here, not trainings: no number of seeds stands behind it.
    low, high = (None if end is None else _percent(end) for end in (value.low, value.high))
    return Estimate(_percent(value.value), low, high, value.p, value.units)


def training_change(view: View) -> Estimate | None:
    """By how many % whole trainings with RMSNorm took longer, on the seeds that both have."""
    seconds = []
    for row in (RMS, LAYER):
        measured = view.estimate(SECONDS, {"row": row, **OF_TRAININGS})
        known = zip(measured.seeds, measured.per_seed, strict=True) if measured else ()
        seconds.append(dict(known))
    shared = seconds[0].keys() & seconds[1].keys()
    if not shared:
        return None
    ours, other = (sum(by_seed[seed] for seed in shared) for by_seed in seconds)
    return Estimate(_percent(log(ours / other)))


def early_difference(view: View) -> Estimate | None:
    """Training loss of the first `EARLY` of the steps; both norms had the same batches.

    Without a p where fewer than `SEEDS` were trained.
    """
    ours, other = (_early(view, row) for row in (RMS, LAYER))
    shared = sorted(ours.keys() & other.keys())
    if not shared:
        return None
    change = of_seeds({seed: ours[seed] - other[seed] for seed in shared}, view.bootstrap.level)
    return change if len(shared) >= SEEDS else replace(change, p=None)


def _early(view: View, row: str) -> dict[int, float]:
    """The mean loss of each seed's training over the first steps, in thousandths of a nat."""
    where: dict[str, Any] = {**OF_TRAININGS, "row": row}
    last = EARLY * max(view.values("sum", {**where, "statistic": "steps"}), default=0.0)
    losses = select(view.frame, {**where, "statistic": "loss", "axis": "step"})
    early = losses.filter(pl.col("bin") <= max(1.0, last), pl.col("of") > 0)
    added = early.group_by("seed").agg(pl.col("sum", "of").sum())
    return {seed: 1000 * above / below for seed, above, below in added.rows()}


def _percent(log_ratio: float) -> float:
    return round(100 * (exp(log_ratio) - 1), 7) + 0.0


# Figures and the study


def figures(view: View) -> list[Figure]:
    """F1 and loss on the development set, and the training loss, by step."""
    looked = {"protocol": DEVELOPMENT}
    panels = (
        _panel(view, "micro_f1", "micro F1, development set", "F1 (%)", 100.0, looked),
        _panel(view, "macro_f1", "macro F1, development set", "F1 (%)", 100.0, looked),
        _panel(view, "loss", "loss, development set", "thousandths of a nat", 1000.0, looked),
        _panel(
            view, "loss", "loss, training batches", "thousandths of a nat", 1000.0, OF_TRAININGS
        ),
    )
    title = (
        "LayerNorm and RMSNorm, step by step: means, bands of all seeds; F1 at the threshold that "
        "is best on the development set there and then"
    )
    return [Curves("training", title, panels, shared_y=False)]


def _panel(
    view: View, statistic: str, title: str, unit: str, scale: float, where: Mapping[str, Any]
) -> Panel:
    def scaled(point: Point) -> Point:
        low, high = (None if end is None else scale * end for end in (point.low, point.high))
        return Point(point.x, scale * point.value, low, high)

    lines = tuple(
        Line(row, tuple(map(scaled, points)), row, dashed=row == RMS)
        for row in norms(view)
        if (points := step_points(view, statistic, {"row": row, **where}))
    )
    return Panel(title, lines, "optimiser step", unit)


STUDY = Study(
    "rmsnorm",
    "What does RMSNorm save against LayerNorm, and what does it cost?",
    title="LayerNorm against RMSNorm",
    help="Train a multi-label classifier with each norm, classify, time their steps in turn.\n\n"
    "Seeds are added by running it again with other --seeds on the same OUT; another "
    "setting that a result depends on is refused. It needs `pip install 'normattn[eval]'`.",
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
    collect=partial(of_trainings, also=_as_it_went),
    variants_help="LayerNorm, RMSNorm, or both, by a comma. [default: both]",
    examples=(
        ("--preset smoke", "the whole path in about a minute"),
        ("", "the study itself: six trainings of 7.93M parameters"),
        ("--corpus FOLDER", "your own documents, in the form of NYT24"),
        ("--plan", "its cost"),
    ),
)
