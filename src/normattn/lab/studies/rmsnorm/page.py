"""The page of the norm study: F1, loss and time of both norms, what the source says of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import exp, log
from typing import Any

import numpy as np
import polars as pl

from normattn.lab.report.claim import SEEDS, Claim
from normattn.lab.report.figure import Curves, Figure, Line, Panel, Point
from normattn.lab.report.page import Page
from normattn.lab.report.points import step_points
from normattn.lab.report.table import NOTHING, Cell, Column, Row, Table, shown
from normattn.lab.report.view import View
from normattn.lab.stats import Estimate, Metric, contrast, estimate, of_seeds, select
from normattn.lab.stats.metrics import MACRO_F1, MICRO_F1, mean, median, ratio
from normattn.lab.studies.base import ranked
from normattn.lab.studies.rmsnorm.measuring import CLASSIFIED, DEVELOPMENT, STEP_TIME

LAYER, RMS = "LayerNorm", "RMSNorm"
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
LOG_STEP = replace(STEP, value=lambda *sums: np.log(STEP.value(*sums)))
THRESHOLD = mean("threshold", "threshold")
PARAMETERS = mean("parameters", "parameters", 0)
SECONDS = mean("training_seconds", "training, s", 0)

TESTED, TRAINED, TIMED = ({"protocol": name} for name in (CLASSIFIED, "training", STEP_TIME))


def norms(view: View) -> list[str]:
    """The norms that were trained, LayerNorm first."""
    return ranked(view.values("row"), (LAYER, RMS))


def _threshold(view: View, row: Row) -> Cell:
    """From the lowest to the highest seed's."""
    threshold = view.estimate(THRESHOLD, {**row.where, **TRAINED})
    if threshold is None:
        return NOTHING
    ends = sorted({min(threshold.per_seed), max(threshold.per_seed)})
    return Cell(" to ".join(f"{end:.2f}" for end in ends), threshold)


def _step(view: View, row: Row) -> Cell:
    """The median of the rounds."""
    sums = view.sums(STEP.name, {**row.where, **TIMED})
    if sums is None:
        return NOTHING
    value = estimate(sums.by_unit(), STEP, view.bootstrap)
    return Cell(shown(value, STEP.digits), value)


def _source_f1(view: View, row: Row) -> Cell:
    return Cell(f"{PUBLISHED[row.label][0]:.2f}")


def _source_seconds(view: View, row: Row) -> Cell:
    return Cell(f"{PUBLISHED[row.label][1]:.0f}")


COLUMNS = (
    Column("micro_f1", "micro F1, %", MICRO_F1.at(TESTED)),
    Column("macro_f1", "macro F1, %", MACRO_F1.at(TESTED)),
    Column("loss", LOSS.title, LOSS.at(TESTED)),
    Column("threshold", "threshold", plain=_threshold),
    Column("parameters", "parameters", PARAMETERS.at(TRAINED), interval=False),
    Column("step_ms", STEP.title, plain=_step),
    Column("training_seconds", SECONDS.title, SECONDS.at(TRAINED), interval=False),
    Column("source_f1", "source: F1, %", plain=_source_f1),
    Column("source_seconds", "source: s", plain=_source_seconds),
)


def _notes(view: View) -> Sequence[str]:
    timed = [said for said in view.values("settings", TIMED) if said]
    rounds = len(view.values("unit", TIMED))
    labels = len(view.values("bin", {**TESTED, "statistic": MICRO_F1.name}))
    documents = len(view.values("unit", TESTED))
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
            f"step: median of an optimiser step ({said}), both norms in turn in one process, "
            f"{rounds} rounds on the same batches; intervals over the rounds."
            for said in timed[:1]
        ),
    )


def claims(view: View) -> list[Claim]:
    """A little F1 lost, 7 % of the time saved, a higher loss early in training."""
    costs = f"RMSNorm costs a little F1 ({LOST:.2f} points)"
    saves = f"RMSNorm saves time ({SAVED:.0f} %)"
    return [
        _tested(costs, SOURCE, MICRO_F1, "micro F1 in points", -1, LOST),
        _tested(costs, SOURCE, MACRO_F1, "macro F1 in points", -1, LOST),
        _tested(
            "RMSNorm costs a little, whatever the threshold: its test loss is higher",
            *("asked here", LOSS, "test loss in thousandths of a nat", 1, None),
        ),
        Claim(
            saves,
            None,
            SOURCE,
            "RMSNorm to LayerNorm, median time of a step, change in %, paired over rounds",
            test=step_change,
            sign=-1,
            matters=SAVED,
            digits=1,
        ),
        Claim(
            saves,
            None,
            SOURCE,
            "RMSNorm to LayerNorm, time of whole trainings, change in % (beside other work, so "
            "without an interval)",
            test=training_change,
            sign=-1,
            digits=1,
        ),
        Claim(
            "RMSNorm's loss is higher early in training",
            None,
            SOURCE,
            f"RMSNorm − LayerNorm, training loss of the first {EARLY:.0%} of the steps in "
            "thousandths of a nat, paired over seeds",
            test=early_difference,
            digits=2,
        ),
    ]


def _tested(
    sentence: str, source: str, statistic: Metric, words: str, sign: int, matters: float | None
) -> Claim:
    """RMSNorm − LayerNorm on the test set, paired over documents and seeds."""
    tested = statistic.at(TESTED)
    change = tested.at(variant=RMS) - tested.at(variant=LAYER)
    return Claim(sentence, change, source, f"{RMS} − {LAYER}, {words}", sign, matters)


def step_change(view: View) -> Estimate | None:
    """By how many % a step with RMSNorm takes longer: the ratio of medians, rounds as pairs.

    The interval is that of the ratio's logarithm.
    """
    both = [view.sums(STEP.name, {"row": row, **TIMED}) for row in (RMS, LAYER)]
    if both[0] is None or both[1] is None:
        return None
    terms = [(1.0, both[0].by_unit()), (-1.0, both[1].by_unit())]
    value = contrast(terms, LOG_STEP.value, view.bootstrap)
    # Rounds vary here, not trainings: no number of seeds stands behind it.
    return Estimate(
        _percent(value.value),
        None if value.low is None else _percent(value.low),
        None if value.high is None else _percent(value.high),
        value.p,
        value.units,
    )


def training_change(view: View) -> Estimate | None:
    """By how many % whole trainings with RMSNorm took longer, on the seeds that both have."""
    seconds = [_per_seed(view, SECONDS, row) for row in (RMS, LAYER)]
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


def _per_seed(view: View, statistic: Metric, row: str) -> dict[int, float]:
    measured = view.estimate(statistic, {"row": row, **TRAINED})
    return {} if measured is None else dict(zip(measured.seeds, measured.per_seed, strict=True))


def _early(view: View, row: str) -> dict[int, float]:
    """The mean loss of each seed's training over the first steps, in thousandths of a nat."""
    where: dict[str, Any] = {**TRAINED, "row": row}
    last = EARLY * max(view.values("sum", {**where, "statistic": "steps"}), default=0.0)
    losses = select(view.frame, {**where, "statistic": "loss", "axis": "step"})
    early = losses.filter(pl.col("bin") <= max(1.0, last), pl.col("of") > 0)
    added = early.group_by("seed").agg(pl.col("sum", "of").sum())
    return {seed: 1000 * above / below for seed, above, below in added.rows()}


def _percent(log_ratio: float) -> float:
    return round(100 * (exp(log_ratio) - 1), 7) + 0.0


def figures(view: View) -> list[Figure]:
    """F1 and loss on the development set, and the training loss, by step."""
    looked = {"protocol": DEVELOPMENT}
    panels = (
        _panel(view, "micro_f1", "micro F1, development set", "F1 (%)", 100.0, looked),
        _panel(view, "macro_f1", "macro F1, development set", "F1 (%)", 100.0, looked),
        _panel(view, "loss", "loss, development set", "thousandths of a nat", 1000.0, looked),
        _panel(view, "loss", "loss, training batches", "thousandths of a nat", 1000.0, TRAINED),
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


PAGE = Page(
    title="LayerNorm against RMSNorm",
    question="What does RMSNorm save against LayerNorm, and what does it cost?",
    sources=("F1 0.9585 with LayerNorm and 0.9559 with RMSNorm, 231 s and 215 s (NYT24)",),
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
)
