"""Do normalised queries and keys translate better and tolerate high learning rates? (QK-Norm)

The sources claim 28.5 → 29.2 BLEU in translation (arXiv 2010.04245), and stability (2302.05442).
Three experiments: translation with each score (BLEU, chrF, loss); a learning-rate sweep of some
scores at ×1 … ×32 (final loss, largest logit); and, where the preset has them, the same scores in a
small Vision Transformer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl

from normattn.lab.diagnostics.lines import read_diagnostics
from normattn.lab.evaluation.masked import MARGIN
from normattn.lab.report.claims import SEEDS, Claim
from normattn.lab.report.figures import Curves, Figure, Line, Panel, Point
from normattn.lab.report.tables import EMPTY_CELL, Cell, Column, Row, Table, text_column
from normattn.lab.report.view import View, points
from normattn.lab.stats import Estimate, Identity, Metric, sign_test, sums, with_identity
from normattn.lab.stats.arrays import Where
from normattn.lab.stats.measurements import empty
from normattn.lab.stats.metrics import BLEU, CHRF
from normattn.lab.studies.base import Study
from normattn.lab.studies.lm_report import interval_figure, ranked, training_outcomes
from normattn.lab.studies.qknorm_runs import (
    CLIP,
    IMAGES,
    MUON,
    RATES,
    SCORES,
    TRANSLATION,
    TranslationRun,
    VisionRun,
    resolve,
    split_row,
)
from normattn.lab.sweep.collect import collect_measurements

# Measurements

BASE = "Baseline"
LOSS, ACCURACY, UNIGRAM = (Metric(name) for name in ("loss", "accuracy", "unigram_loss"))
IMAGE_ACCURACY = Metric("accuracy", "accuracy", ACCURACY.value, "%", 2)
IMAGE_LOSS = Metric("loss", "loss", LOSS.value, "nats", 4)


def where_of(experiment: str, score: str, rate: float | None = None) -> dict[str, Any]:
    """Columns that select a score's measurements; `rate` multiplies the learning rate."""
    where = {"row": score, "protocol": experiment, "factor.experiment": experiment}
    return where if rate is None else {**where, "factor.rate": rate}


def scores(view: View, experiment: str) -> list[str]:
    """The scores of an experiment in the order of the table, including diverged ones."""
    return ranked(view.values("row", {"factor.experiment": experiment}), SCORES)


def multiples(view: View, experiment: str, score: str | None = None) -> list[float]:
    """The multiples of the learning rate in an experiment, or of one of its scores, ascending."""
    row = {} if score is None else {"row": score}
    return sorted(view.values("factor.rate", {"factor.experiment": experiment, **row}))


def base_of(row: str) -> str:
    """The reference of a row in the sweep: Baseline with the same optimiser, without QK-Clip."""
    return "+".join((BASE, *(name for name in split_row(row)[1] if name != CLIP)))


def failures(view: View, where: Where) -> dict[int, bool]:
    """For each seed, whether its training diverged or learned nothing."""
    return {seed: end != "learned" for seed, end in training_outcomes(view, where).items()}


def rated_rows(experiment: str, view: View) -> list[Row]:
    """A row for every score and learning rate of an experiment."""
    return [
        Row(f"{score} ×{rate:g}", where_of(experiment, score, rate))
        for score in scores(view, experiment)
        for rate in multiples(view, experiment, score)
    ]


def largest_logits(identity: Identity, run: Path) -> pl.DataFrame:
    """The largest logit of any head at each recorded step of a training."""
    measured = [
        sums("largest_logit", [""], [[line.largest]], [[1.0]], axis="step", edges=[line.step])
        for line in read_diagnostics(run)
        if line.largest is not None
    ]
    return with_identity(identity, measured) if measured else empty()


# Columns


def _learning_rate(view: View, row: Row) -> str | None:
    # Read it from the training, as one that ended in NaN has no tested model.
    rate = view.only_value("factor.learning_rate", {**row.where, "protocol": "training"})
    return None if rate is None else f"{rate:.3g}"


def _failed(view: View, row: Row) -> str | None:
    failed = failures(view, row.where)
    return f"{sum(failed.values())} of {len(failed)}" if failed else None


def _largest_logit(view: View, row: Row) -> Cell:
    recorded = {**row.where, "protocol": "training", "statistic": "largest_logit"}
    values, seeds = view.values("sum", recorded), tuple(view.values("seed", recorded))
    largest = max(values, default=0.0)
    return Cell(f"{largest:.3g}", Estimate(largest, seeds=seeds)) if values else EMPTY_CELL


def _seeds(view: View, row: Row) -> str:
    return " ".join(map(str, sorted(view.values("seed", row.where))))


def _results(*metrics: Metric) -> tuple[Column, ...]:
    """A column for each metric, then one for its difference to Baseline."""
    changes = (Column(f"change_{m.name}", f"Δ {m.title}", m - m.at(variant=BASE)) for m in metrics)
    return (*(Column(m.name, m.title, m) for m in metrics), *changes)


SEEDS_TESTED = text_column("seeds", "seeds", _seeds)
LOGIT = Column("largest_logit", "largest logit", plain=_largest_logit)
RATE = text_column("learning_rate", "learning rate", _learning_rate)
FAILED = text_column("failed", "failed", _failed)


def _translation_notes(view: View) -> Sequence[str]:
    decoding = view.values("settings", {"protocol": TRANSLATION})
    return (
        "BLEU, chrF: of the translations by beam search, as sacrebleu computes them, averaged over "
        "seeds.",
        "Loss (nats), accuracy (%): per target token of the references, given those before it.",
        "Δ: difference to Baseline, paired over sentences and seeds.",
        "BatchNorm and InstanceNorm rows: in the encoder, and on the keys of the cross attention. "
        "Elsewhere they would see future tokens, so those layers are Baseline's.",
        *_addition_notes(view, TRANSLATION),
        *(f"translated with {settings}" for settings in sorted(filter(None, decoding))),
    )


def _addition_notes(view: View, experiment: str) -> Iterator[str]:
    """Explain the additions of rows with a +, where there are any."""
    additions = {name for row in scores(view, experiment) for name in split_row(row)[1]}
    if MUON in additions:
        yield (
            "+Muon: Muon updates the layers' matrices, AdamW all other parameters. Multiples are "
            "of the row's own learning rate, which may differ from that of other rows."
        )
    if CLIP in additions and "factor.qk_clip" in view.frame.columns:
        for bound in filter(None, view.values("factor.qk_clip")):
            yield (
                "+QK-Clip: after each step, the query and key weights of a head whose largest "
                f"logit exceeded τ = {bound:g} are scaled down, so that it would have been τ."
            )


LOGIT_NOTE = "Largest logit: of any recorded step, layer, head and seed."


def unigram(view: View) -> float | None:
    """The loss of the unigram model on the sweep's test set."""
    estimates = (view.estimate(UNIGRAM, row.where) for row in rated_rows(RATES, view))
    return min((estimate.value for estimate in estimates if estimate is not None), default=None)


def _rate_notes(view: View) -> Sequence[str]:
    unigram_loss = unigram(view)
    nats = "" if unigram_loss is None else f" ({unigram_loss:.2f} nats)"
    return (
        "Loss: nats per target token of the references, after training at a multiple of the "
        "learning rate. Δ: difference to Baseline at the same rate.",
        f"Failed: seeds that ended in NaN, or less than {MARGIN:g} nats better than the unigram "
        f"baseline{nats}, which predicts each word by its frequency in the training pairs.",
        *_addition_notes(view, RATES),
        LOGIT_NOTE,
    )


# Claims

CLAIMED = ("QKLayerNorm", "QKRMSNorm", "QKNorm2020")
"""The norms of queries and keys that the source's claim covers; QKNorm2020 is the source's."""
TRANSLATES, STABLE, BOUNDED = "arXiv 2010.04245", "arXiv 2302.05442", "arXiv 2507.20534"
HERE = "asked here"
CLIPPED = (("Baseline+QK-Clip", "QKRMSNorm"), ("Baseline+Muon+QK-Clip", "QKRMSNorm+Muon"))
"""Rows that compare clipping with normalising, with AdamW and with Muon."""


def claims(view: View) -> Iterator[Claim]:
    """Claims on translations, on high learning rates, and on QK-Clip instead of a norm."""
    for score in CLAIMED:
        sentence = f"{score} translates better than {BASE}"
        yield _difference(sentence, TRANSLATES, BLEU, score, BASE, TRANSLATION)
        sentence = f"{score} has a lower loss than {BASE}"
        yield _difference(sentence, TRANSLATES, LOSS, score, BASE, TRANSLATION, sign=-1)
    rows = dict.fromkeys((*scores(view, RATES), *scores(view, IMAGES)))
    sources = {row: BOUNDED if CLIP in row else STABLE for row in rows if row != base_of(row)}
    for experiment, metric, sign, statement in (
        (RATES, LOSS, -1, "has a lower loss"),
        (IMAGES, IMAGE_ACCURACY, 1, "is more accurate on images"),
    ):
        high = max(multiples(view, experiment), default=1.0)
        for row in scores(view, experiment) if high > 1 else ():
            if row in sources:
                base, source = base_of(row), sources[row]
                sentence = f"{row} at ×{high:g} of the learning rate {statement} than {base}"
                yield _difference(sentence, source, metric, row, base, experiment, high, sign)
    for row in scores(view, RATES):
        if row in sources:
            sentence = f"fewer trainings fail with {row} than with {base_of(row)} in the "
            sentence += "learning-rate sweep"
            yield _fails_less(sentence, sources[row], row, base_of(row))
    high = max(multiples(view, RATES), default=1.0)
    for clipped, normed in CLIPPED:
        sentence = f"{clipped} tolerates as high a learning rate as {normed} "
        sentence += "(at least no worse: the difference is not below 0)"
        yield _fails_less(sentence, HERE, clipped, normed)
        for experiment, rate in ((RATES, high), (TRANSLATION, None)):
            rated = "" if rate is None else f"at ×{rate:g} of the learning rate "
            sentence = f"{clipped} {rated}ends at as good a loss as {normed} "
            sentence += "(at least no worse: the difference is not above 0)"
            yield _difference(sentence, HERE, LOSS, clipped, normed, experiment, rate, sign=-1)


def _difference(
    sentence: str,
    source: str,
    metric: Metric,
    score: str,
    base: str,
    experiment: str,
    rate: float | None = None,
    sign: int = 1,
) -> Claim:
    """A claim on a score minus another, in the same experiment at the same learning rate."""
    at_rate = "" if rate is None else f" at ×{rate:g}"
    first, second = (metric.at(where_of(experiment, row, rate)) for row in (score, base))
    measured = f"{score} − {base}{at_rate}, {metric.title}"
    return Claim(sentence, first - second, source, measured, sign)


def _fails_less(sentence: str, source: str, score: str, base: str) -> Claim:
    """A claim tested by an exact sign test over the sweep's trainings, which are not random.

    Trainings of one seed at several rates are similar: with fewer than `SEEDS` there is no p.
    """

    def test(view: View) -> Estimate | None:
        failed: dict[tuple[float, int], tuple[bool, bool]] = {}
        for rate in multiples(view, RATES, score):
            first, second = (failures(view, where_of(RATES, row, rate)) for row in (base, score))
            pairs = first.keys() & second.keys()
            failed |= {(rate, seed): (first[seed], second[seed]) for seed in pairs}
        if not failed:
            return None
        seeds = tuple(sorted({seed for _, seed in failed}))
        counts = Counter(failed.values())
        only_base, only_score = counts[True, False], counts[False, True]
        return Estimate(
            float(only_base - only_score),
            p=sign_test(only_base, only_score) if len(seeds) >= SEEDS else None,
            units=len(failed),
            seeds=seeds,
        )

    measured = f"trainings in which only {base} fails − only {score} (exact sign test)"
    return Claim(sentence, None, source, measured, test=test, digits=0)


# Figures


def figures(view: View) -> list[Figure]:
    """BLEU and loss by score, results by learning rate."""
    rows = [Row(score, where_of(TRANSLATION, score, 1.0)) for score in scores(view, TRANSLATION)]
    rows = [row for row in rows if view.sums(LOSS.name, row.where) is not None]
    columns = [Column("bleu", BLEU.title, BLEU), Column("loss", "loss (nats)", LOSS)]
    shown = columns if len(rows) > 1 else ()  # one score has nothing to be compared with
    made: list[Figure] = [
        interval_figure(view, "bleu_by_score", "Translation by score", rows, shown)
    ]
    losses, unigram_loss = _lines_by_rate(view, RATES, LOSS), unigram(view)
    if unigram_loss is not None:
        level = tuple(Point(rate, unigram_loss) for rate in multiples(view, RATES))
        losses = (*losses, Line("unigram baseline", level, control=True))
    accuracies = _lines_by_rate(view, IMAGES, IMAGE_ACCURACY)
    for name, title, lines, y_title in (
        ("loss_by_learning_rate", "Test loss", losses, "nats per token"),
        ("vision_by_learning_rate", "Images: accuracy", accuracies, "accuracy (%)"),
    ):
        x_title = "learning rate, in units of the preset's"
        panel = Panel("", lines, x_title, y_title, log_x=True)
        made.append(Curves(name, title, (panel,)))
    return made


def _lines_by_rate(view: View, experiment: str, metric: Metric) -> tuple[Line, ...]:
    """A line for every score trained at several rates; no point where every seed ended in NaN."""
    lines = []
    for score in scores(view, experiment):
        rates = multiples(view, experiment, score)
        plotted = points(view, ((x, metric.at(where_of(experiment, score, x))) for x in rates))
        if len(rates) > 1 and plotted:
            lines.append(Line(score, plotted, score))
    return tuple(lines)


STUDY = Study(
    "qknorm",
    "Do normalised queries and keys translate better, and do they tolerate high learning rates?",
    title="QK-Norm: translation and stability",
    help="Train translation models with each score, a learning-rate sweep, and small Vision "
    "Transformers.\n\n"
    "To add configurations, rerun with other --variants or --seeds and the same OUT. Changing any "
    "other setting that affects a result raises an error. It needs the extra `studies`.",
    sources=("arxiv.org/abs/2010.04245", "arxiv.org/abs/2302.05442"),
    resolve=resolve,
    runs=(TranslationRun, VisionRun),
    tables=(
        Table(
            "table",
            "Translation by score",
            lambda view: [
                Row(score, where_of(TRANSLATION, score)) for score in scores(view, TRANSLATION)
            ],
            (*_results(BLEU, CHRF, LOSS, ACCURACY), SEEDS_TESTED),
            notes=_translation_notes,
        ),
        Table(
            "rates",
            "The learning-rate sweep",
            partial(rated_rows, RATES),
            (RATE, *_results(LOSS), FAILED, LOGIT, SEEDS_TESTED),
            notes=_rate_notes,
        ),
        Table(
            "vision",
            "The same scores in a small Vision Transformer",
            partial(rated_rows, IMAGES),
            (RATE, *_results(IMAGE_ACCURACY, IMAGE_LOSS), LOGIT, SEEDS_TESTED),
            notes=(
                "Accuracy (%), loss (nats): per image. Δ: difference to Baseline at the same "
                "learning rate, paired over images and seeds.",
                LOGIT_NOTE,
            ),
        ),
    ),
    claims=claims,
    figures=figures,
    collect=partial(collect_measurements, factors=("experiment",), also=largest_logits),
    variants_help="Scores, separated by commas; the sweep and the images use those of them that "
    "the preset names. [default: the preset's]",
    examples=(("--preset multi30k --corpus FOLDER", "three scores on multi30k, three seeds"),),
)
