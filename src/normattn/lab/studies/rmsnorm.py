"""What does RMSNorm save against LayerNorm, and what does it cost? (relation classification)

The source's claim is that RMSNorm costs a little F1 and saves a little time. Both norms are
trained with the same seeds, batches and settings; the time of a step is measured with the steps of
both in turn, in one process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import exp, log
from typing import Any

import numpy as np
import polars as pl

from normattn.lab.report.claims import SEEDS, Claim
from normattn.lab.report.figures import Curves, Figure, Line, Panel, Point
from normattn.lab.report.tables import (
    NOTHING,
    Cell,
    Column,
    Row,
    Table,
    estimate_column,
    shown,
    text_column,
)
from normattn.lab.report.view import View, step_points
from normattn.lab.stats import (
    Estimate,
    Metric,
    contrast,
    estimate,
    of_seeds,
    select,
)
from normattn.lab.stats.metrics import MACRO_F1, MICRO_F1, mean, median, ratio
from normattn.lab.studies.base import Study
from normattn.lab.studies.lm_report import ranked
from normattn.lab.studies.rmsnorm_runs import (
    CLASSIFIED,
    DEVELOPMENT,
    LAYER,
    RMS,
    STEP_TIME,
    NormRun,
    TimeRun,
    as_it_went,
    resolve,
)
from normattn.lab.sweep.collect import of_trainings

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
    "Seeds are added by running it again with other --seeds on the same OUT; changing any "
    "other setting that a result depends on raises an error. It needs "
    "`pip install 'normattn[eval]'`.",
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
    collect=partial(of_trainings, also=as_it_went),
    variants_help="LayerNorm, RMSNorm, or both, by a comma. [default: both]",
    examples=(
        ("--preset smoke", "the whole path in about a minute"),
        ("", "the study itself: six trainings of 7.93M parameters"),
        ("--corpus FOLDER", "your own documents, in the form of NYT24"),
        ("--plan", "its cost"),
    ),
)
