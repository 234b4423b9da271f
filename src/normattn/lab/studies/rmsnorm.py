"""What does RMSNorm save against LayerNorm, and what does it cost? (relation classification)

The source claims that RMSNorm costs a little F1 and saves a little time. Both norms are trained
with the same seeds, batches and settings. Steps of both are timed in turn, in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import cycle, product
from math import exp
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import polars as pl
from pydantic import Field

from normattn.errors import unknown_name
from normattn.lab.data.relations import (
    PYTHON_IMPORTS,
    RelationConfig,
    RelationData,
    prepare_relations,
)
from normattn.lab.evaluation.classification import evaluate_classifier
from normattn.lab.report.claims import SEEDS, Claim
from normattn.lab.report.tables import Column, Row, Table, text_column
from normattn.lab.report.view import View
from normattn.lab.runs.environment import torch_threads
from normattn.lab.runs.timing import interleave
from normattn.lab.stats import Estimate, Identity, Sums, concat, estimate_over_seeds, select, sums
from normattn.lab.stats.measurements import with_identity
from normattn.lab.stats.metrics import MACRO_F1, MICRO_F1, mean, median, ratio
from normattn.lab.studies.base import Metric, Study
from normattn.lab.studies.lm_report import history_figure, ranked
from normattn.lab.studies.preset import StudyPreset, load_preset
from normattn.lab.sweep.config import SweepConfig, merged
from normattn.lab.sweep.paths import RunPaths
from normattn.lab.sweep.run import MeasuredRun, Progress, Request, Run, Stage, Sweep
from normattn.lab.training.distributed import World, process_group
from normattn.lab.training.planning import Cost
from normattn.lab.training.step import TrainStep
from normattn.lab.training.tasks.classification import NOMINAL_LENGTH, ClassificationConfig
from normattn.models.flops import stack_flops
from normattn.settings import Settings

LAYER, RMS = "LayerNorm", "RMSNorm"
NORMS = {LAYER: "layer", RMS: "rms"}
"""The rows of the table, and the model's setting of each."""
TIMED = "step time"
"""The variant and the directory of the run that times the steps."""
CLASSIFIED, STEP_TIME = "classification", "step time"
"""The protocols, which are also the names of their records."""
ASSUMED_DOCUMENTS = 1000
"""Documents that the plan assumes, as the data is not loaded yet."""
WARM_UP = 3
"""Steps of each norm before its steps are timed."""

# Preset and runs


class TimingSettings(Settings):
    """One step of each norm is timed in each of `rounds`."""

    rounds: int = Field(default=30, ge=2)


class RMSNormPreset(StudyPreset):
    """A preset of the study; `training` holds fields of `ClassificationConfig`.

    The data decides the number of labels.
    """

    varied: ClassVar[Mapping[str, Any]] = {"model.norm": "layer"}

    timing: TimingSettings = TimingSettings()
    seeds: int = Field(default=3, ge=1)


class NormRun(MeasuredRun):
    """A classifier with one of `NORMS`, trained with one seed."""

    training_class: ClassVar[type[ClassificationConfig]] = ClassificationConfig
    record = CLASSIFIED
    kind: Literal["rmsnorm"] = "rmsnorm"

    def cost(self, config: ClassificationConfig) -> Cost:
        """An estimate, as the data is not loaded yet: documents of a nominal length."""
        tokens = ASSUMED_DOCUMENTS * NOMINAL_LENGTH
        return Cost(scored=tokens, flops=tokens * stack_flops(config.model, NOMINAL_LENGTH).forward)

    def measure(
        self, folder: Path, config: ClassificationConfig, data: RelationData, progress: Progress
    ) -> pl.DataFrame:
        """Tune the threshold on the development set, then evaluate on the test set."""
        return evaluate_classifier(
            self.load_trained(folder, config),
            data,
            self.identity(CLASSIFIED),
            precision=config.precision,
            progress=lambda done, total: progress(done, total, "documents"),
        )


class TimeRun(MeasuredRun):
    """Times optimiser steps of models with each of `norms` in turn, on the same batches.

    The units are rounds: a round runs one step of each norm on one batch, so that norms are paired
    over rounds.
    """

    training_class: ClassVar[type[ClassificationConfig]] = ClassificationConfig
    record, phase = STEP_TIME, "timing"
    kind: Literal["rmsnorm-time"] = "rmsnorm-time"
    norms: tuple[str, ...]
    timing: TimingSettings

    def stages(self, paths: RunPaths) -> list[Stage]:
        """Measure; nothing is trained."""
        return [self.measurement_stage(paths.run, self.training_config)]

    def cost(self, config: ClassificationConfig) -> Cost:
        """The cost of the steps, each token counted as three scored ones."""
        costs = [timed_config.cost() for timed_config in self._configs(config).values()]
        share = (self.timing.rounds + WARM_UP) / config.steps
        return Cost(
            scored=round(3 * share * sum(cost.trained for cost in costs)),
            flops=share * sum(cost.flops for cost in costs),
        )

    def measure(
        self, folder: Path, config: ClassificationConfig, data: RelationData, progress: Progress
    ) -> pl.DataFrame:
        """Time the steps of all norms in turn."""
        rounds, configs = self.timing.rounds, self._configs(config)
        with process_group(config.device) as process, torch_threads(config.threads):
            timings = interleave(
                {norm: _stepper(configs[norm], data, process) for norm in configs},
                rounds,
                warm=WARM_UP,
                device=process.device.type,
                min_seconds=0.0,
                on_round=lambda done: progress(done, rounds, "rounds"),
            )
        count = f"{config.threads} thread{'s' * (config.threads > 1)}"
        setup = f"{config.batch_size} documents, {config.precision}, {process.device.type}, {count}"
        identity = self.identity(STEP_TIME, settings=setup)
        return concat(
            timed(replace(identity, row=norm, score=norm), timing.rounds)
            for norm, timing in timings.items()
        )

    def _configs(self, first: ClassificationConfig) -> dict[str, ClassificationConfig]:
        models = {norm: first.model.model_copy(update={"norm": NORMS[norm]}) for norm in self.norms}
        return {norm: first.model_copy(update={"model": m}) for norm, m in models.items()}


def timed(identity: Identity, rounds: Sequence[float]) -> pl.DataFrame:
    """The seconds of a step in every round, as measurements."""
    units = [f"round {number:04}" for number in range(len(rounds))]
    return with_identity(identity, [sums("step_time", units, rounds, np.ones(len(rounds)))])


def _stepper(
    config: ClassificationConfig, data: RelationData, process: World
) -> Callable[[], object]:
    """A function that runs one more optimiser step at each call."""
    task = config.task(data, process.device, config.accumulate)
    stepper, numbers = TrainStep(task, config, process, lambda: False), cycle(range(config.steps))
    return lambda: stepper.step(next(numbers) + 1)


def resolve(request: Request) -> Sweep:
    """The sweep of a request; `--variants` choose LayerNorm, RMSNorm or both.

    Raises `InputError` for impossible settings, an unknown norm, and missing or damaged data.
    """
    preset = load_preset(request, "rmsnorm", RMSNormPreset)
    norms = request.variants or tuple(NORMS)
    for norm in norms:
        if norm not in NORMS:
            raise unknown_name("norm", norm, NORMS)
    subject, timing = f"preset {preset.name}, training.data", preset.timing
    data = RelationConfig.parse(preset.training.get("data", {}), subject)
    labels = data.modules if data.corpus == PYTHON_IMPORTS else len(prepare_relations(data).labels)
    training = preset.whole_training(ClassificationConfig, {"model.labels": labels})
    by_norm = {norm: merged(training, {"model.norm": NORMS[norm]}) for norm in norms}
    seeds, runs = request.seeds_or(preset.seeds), list[Run]()
    for seed, norm in product(seeds, norms):
        runs.append(NormRun(variant=norm, seed=seed, training=by_norm[norm]))
    if len(norms) > 1:
        first = by_norm[norms[0]]
        runs.append(TimeRun(variant=TIMED, training=first, norms=norms, timing=timing))
    config = SweepConfig.of(preset.name, training=training, timing=timing)
    return Sweep.of(request, "rmsnorm", config, runs, describe=_describe)


def _describe(run: Run, data: RelationData) -> list[str]:
    if not isinstance(run, NormRun):
        return []
    config = run.training_config
    config.check(data, config.accumulate)
    counts = " / ".join(f"{len(split):,}" for split in data)
    return [
        f"corpus {config.data.corpus}: {counts} documents to train, tune and test on, "
        f"{len(data.labels)} labels; {sum(split.cut for split in data):,} are truncated to "
        f"{config.data.max_tokens} word pieces (vocabulary: {data.tokeniser.vocab_size:,})"
    ]


# Columns

SOURCE = "the source, NYT24"
PUBLISHED = {LAYER: 95.85, RMS: 95.59}
"""The F1 (%) that the source reports for NYT24, with 7.92M parameters."""
LOST = PUBLISHED[LAYER] - PUBLISHED[RMS]
SAVED = 100 * (1 - 215.0 / 231.0)
"""The share of training time (%) that RMSNorm saves there."""
EARLY = 0.1
"""The share of the steps that counts as early in training."""
LOSS = Metric("loss", "loss, mnats", ratio(1000.0), "mnats", 2)
# A median needs the single rounds, so each is a bin.
STEP = Metric("step_time", "step, ms", median(1000.0), "ms", 1).between(Sums.by_unit)
TESTS, TRAININGS, STEPS = ({"protocol": name} for name in (CLASSIFIED, "training", STEP_TIME))


COLUMNS = (
    Column("micro_f1", "micro F1, %", MICRO_F1.at(TESTS)),
    Column("macro_f1", "macro F1, %", MACRO_F1.at(TESTS)),
    Column("loss", LOSS.title, LOSS.at(TESTS)),
    Column("parameters", "parameters", mean("parameters", "", 0).at(TRAININGS), interval=False),
    Column("step_ms", STEP.title, STEP.at(STEPS)),
    text_column(
        "source_f1", "published F1 (NYT24), %", lambda view, row: f"{PUBLISHED[row.label]:.2f}"
    ),
)


def _notes(view: View) -> Sequence[str]:
    labels = len(view.values("bin", {**TESTS, "statistic": MICRO_F1.name}))
    documents, rounds = (len(view.values("unit", where)) for where in (TESTS, STEPS))
    return (
        f"Which of {labels} labels a document has; {documents:,} test documents.",
        "Micro F1: of all labels together. Macro F1: the mean over the labels that are true or "
        "predicted anywhere in the test set. Both are averaged over seeds.",
        "Loss: binary cross-entropy on the test set, averaged over documents and labels, in "
        "thousandths of a nat.",
        "Published F1: what the source reports for NYT24; not measured here.",
        *(
            f"Step: median time of an optimiser step ({setup}), both norms in turn in one process, "
            f"{rounds} rounds on the same batches; intervals over the rounds."
            for setup in view.values("settings", STEPS)[:1]
        ),
    )


# Claims


def claims(view: View) -> Iterator[Claim]:
    """Claims on F1, test loss, step time, and the loss early in training."""
    changes = {
        metric.title: metric.at(TESTS, variant=RMS) - metric.at(TESTS, variant=LAYER)
        for metric in (MICRO_F1, MACRO_F1, LOSS)
    }
    for metric in (MICRO_F1, MACRO_F1):
        yield Claim(
            f"RMSNorm costs a little F1 ({LOST:.2f} points)",
            changes[metric.title],
            *(SOURCE, f"{RMS} − {LAYER}, {metric.title} in points"),
            sign=-1,
            matters=LOST,
        )
    yield Claim(
        "RMSNorm costs a little, whatever the threshold: its test loss is higher",
        changes[LOSS.title],
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


def step_change(view: View) -> Estimate | None:
    """The change of the median step time with RMSNorm, in %, paired over rounds.

    The interval comes from the logarithm of the ratio. There are no seeds, as only rounds vary.
    """

    def percent(log_ratio: float) -> float:
        return round(100 * (exp(log_ratio) - 1), 7) + 0.0

    log_median = Metric("step_time", value=lambda *sums: np.log(median()(*sums)))
    log_time = log_median.between(Sums.by_unit).at(STEPS)
    value = view.finite_estimate(log_time.at(row=RMS) - log_time.at(row=LAYER))
    if value is None:
        return None
    low, high = (None if end is None else percent(end) for end in (value.low, value.high))
    return Estimate(percent(value.value), low, high, value.p, value.units)


def early_difference(view: View) -> Estimate | None:
    """The difference in training loss early in training (`EARLY`), in thousandths of a nat.

    Both norms have the same batches, so seeds are paired. With fewer than `SEEDS` there is no p.
    """
    means: list[dict[int, float]] = []
    for row in (RMS, LAYER):
        losses = select(view.frame, {**TRAININGS, "row": row, "statistic": "loss", "axis": "step"})
        early = losses.filter(pl.col("bin") <= (EARLY * pl.col("bin").max()).clip(lower_bound=1))
        totals = early.group_by("seed").agg(pl.col("sum", "of").sum())
        means.append({seed: 1000 * total / count for seed, total, count in totals.rows() if count})
    rms, layer = means
    changes = {seed: rms[seed] - layer[seed] for seed in sorted(rms.keys() & layer.keys())}
    if not changes:
        return None
    change = estimate_over_seeds(changes)
    return change if len(changes) >= SEEDS else replace(change, p=None)


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
            lambda view: [
                Row(norm, {"row": norm}) for norm in ranked(view.values("row"), tuple(NORMS))
            ],
            COLUMNS,
            intro="A classifier of relations, several labels to a document.",
            notes=_notes,
            head="norm",
        ),
    ),
    claims=claims,
    figures=lambda view: [history_figure(view)],
    variants_help="LayerNorm, RMSNorm, or both, separated by a comma. [default: both]",
    examples=(("--corpus FOLDER", "your own documents, in the form of NYT24"),),
)
