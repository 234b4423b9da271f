"""Do normalised queries and keys translate better and tolerate high learning rates? (QK-Norm)

The source claims 28.5 → 29.2 BLEU for QK-Norm in translation, and stability. Three experiments: a
translation model with each score (BLEU, chrF, loss), a learning-rate sweep (some scores at ×1 …
×32 of the learning rate: final loss, largest logit) and, where the preset has
them, the same scores in a small Vision Transformer (arXiv 2010.04245, 2302.05442).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl

from normattn.lab.diagnostics.lines import read_diagnostics
from normattn.lab.evaluation.masked import MARGIN
from normattn.lab.report.claims import SEEDS, Claim
from normattn.lab.report.figures import Curves, Figure, Line, Panel, Point
from normattn.lab.report.tables import Column, Row, Table, estimate_column, text_column
from normattn.lab.report.view import View, points
from normattn.lab.stats import Estimate, Identity, Metric, identified, sign_test, sums
from normattn.lab.stats.arrays import Where
from normattn.lab.stats.measurements import empty
from normattn.lab.stats.metrics import BLEU, CHRF
from normattn.lab.studies.base import Study
from normattn.lab.studies.lm_report import intervals, ranked
from normattn.lab.studies.qknorm_runs import (
    CLIP,
    IMAGES,
    MUON,
    RATES,
    SCORES,
    TRANSLATION,
    TranslationRun,
    VisionRun,
    parts,
    resolve,
)
from normattn.lab.studies.trained import ends
from normattn.lab.sweep.collect import measured_below

# What was measured

BASE = "Baseline"
LOSS, ACCURACY, UNIGRAM = (Metric(name) for name in ("loss", "accuracy", "unigram_loss"))
IMAGE_ACCURACY = Metric("accuracy", "accuracy", ACCURACY.value, "%", 2)
IMAGE_LOSS = Metric("loss", "loss", LOSS.value, "nats", 4)


def at(experiment: str, score: str, rate: float | None = None) -> dict[str, Any]:
    """Where the tested models of a score are; `rate` is the multiple of the learning rate."""
    rated = {} if rate is None else {"factor.rate": rate}
    return {"row": score, "protocol": experiment, "factor.experiment": experiment, **rated}


def scores(view: View, experiment: str) -> list[str]:
    """The scores of an experiment, in the order of the table; diverged ones too."""
    return ranked(view.values("row", {"factor.experiment": experiment}), SCORES)


def multiples(view: View, experiment: str, score: str | None = None) -> list[float]:
    """The multiples of the learning rate of an experiment, or of one score in it, rising."""
    row = {} if score is None else {"row": score}
    return sorted(view.values("factor.rate", {"factor.experiment": experiment, **row}))


def base_of(row: str) -> str:
    """What a row is compared with in the sweep: Baseline by the same optimiser, without QK-Clip."""
    return "+".join((BASE, *(other for other in parts(row)[1] if other != CLIP)))


def failures(view: View, where: Where) -> dict[int, bool]:
    """Of every seed whether its training diverged or learned nothing."""
    return {seed: end != "learned" for seed, end in ends(view, where).items()}


def unigram(view: View) -> float | None:
    """The loss of guessing each word of the sweep's test set by its frequency."""
    rows = [row.where for row in rated_rows(RATES, view)]
    found = [each for each in (view.estimate(UNIGRAM, where) for where in rows) if each is not None]
    return min((each.value for each in found), default=None)


def rated_rows(experiment: str, view: View) -> list[Row]:
    """A row for every score and learning rate of an experiment."""
    return [
        Row(f"{score} ×{rate:g}", at(experiment, score, rate))
        for score in scores(view, experiment)
        for rate in multiples(view, experiment, score)
    ]


def largest_logits(whose: Identity, run: Path) -> pl.DataFrame:
    """By recorded step of a training the largest logit of any head."""
    measured = []
    for line in read_diagnostics(run):
        if (largest := line.largest) is not None:
            step: dict[str, Any] = {"axis": "step", "edges": [float(line.step)]}
            measured.append(sums("largest_logit", [""], [[largest]], [[1.0]], **step))
    return identified(whose, measured) if measured else empty()


# Columns


def _learning_rate(view: View, row: Row) -> str | None:
    # Of all that was measured: a training that ended in NaN has no tested model.
    rate = view.one("factor.learning_rate", {**row.where, "protocol": "training"})
    return None if rate is None else f"{rate:.3g}"


def _failed(view: View, row: Row) -> str | None:
    failed = failures(view, row.where)
    return f"{sum(failed.values())} of {len(failed)}" if failed else None


def _largest_logit(view: View, row: Row) -> Estimate | None:
    """Of any recorded step, layer, head and seed."""
    recorded = {**row.where, "protocol": "training", "statistic": "largest_logit"}
    values = view.values("sum", recorded)
    return Estimate(max(values), seeds=tuple(view.values("seed", recorded))) if values else None


def _results(*metrics: Metric) -> tuple[Column, ...]:
    """Each of them, then each one's difference to Baseline."""
    changes = (Column(f"change_{m.name}", f"Δ {m.title}", m - m.at(variant=BASE)) for m in metrics)
    return (*(Column(m.name, m.title, m) for m in metrics), *changes)


SEEDS_TESTED = text_column(
    "seeds",
    "seeds",
    lambda view, row: " ".join(map(str, sorted(view.values("seed", row.where)))),
)
LOGIT = estimate_column(
    *("largest_logit", "largest logit", _largest_logit), lambda largest: f"{largest.value:.3g}"
)
RATE = text_column("learning_rate", "learning rate", _learning_rate)
FAILED = text_column("failed", "failed", _failed)


def _translation_notes(view: View) -> Sequence[str]:
    made = (each for each in view.values("settings", {"protocol": TRANSLATION}) if each)
    return (
        "BLEU, chrF: of the translations by beam search, as sacrebleu computes them; of several "
        "seeds the mean of theirs.",
        "loss (nats), accuracy (%): per target token of the references, each predicted from those "
        "before it.",
        "Δ: difference to Baseline, paired over sentences and seeds.",
        "BatchNorm and InstanceNorm rows: in the encoder, and on the keys of the cross attention; "
        "elsewhere they would read the future, and those layers are Baseline's.",
        *_trained_with(view, TRANSLATION),
        *(f"translated with {each}" for each in sorted(made)),
    )


def _trained_with(view: View, experiment: str) -> Iterator[str]:
    """What the rows with a + are trained with, as far as there are any."""
    rows = scores(view, experiment)
    if any(MUON in row for row in rows):
        yield (
            "+Muon: Muon moves the layers' matrices and AdamW all else; a multiple of the learning "
            "rate is one of the row's own, which may differ from that of other rows."
        )
    bounds = view.values("factor.qk_clip") if "factor.qk_clip" in view.frame.columns else []
    for bound in bounds:
        if bound is not None and any(CLIP in row for row in rows):
            yield (
                "+QK-Clip: after each step the query and key weights of a head whose largest logit "
                f"in it passed τ = {bound:g} are made smaller, so that it would have been τ."
            )


LOGIT_NOTE = "largest logit: of any recorded step, layer, head and seed."


def _rate_notes(view: View) -> Sequence[str]:
    guess = unigram(view)
    nats = "" if guess is None else f", {guess:.2f} nats"
    return (
        "loss: nats per target token of the references, after training at so many times the "
        "learning rate; Δ: difference to Baseline at the same rate.",
        f"failed: seeds that ended in NaN, or less than {MARGIN:g} nats better than the unigram "
        f"baseline, which guesses each word by its frequency in the training pairs{nats}.",
        *_trained_with(view, RATES),
        LOGIT_NOTE,
    )


# Claims

CLAIMED = ("QKLayerNorm", "QKRMSNorm", "QKNorm2020")
"""The norms of both sides that the source's sentence is about; QKNorm2020 is its own form."""
TRANSLATES, STABLE, BOUNDED = "arXiv 2010.04245", "arXiv 2302.05442", "arXiv 2507.20534"
CLIPPED = (("Baseline+QK-Clip", "QKRMSNorm"), ("Baseline+Muon+QK-Clip", "QKRMSNorm+Muon"))
"""Does clipping do what normalising does? The rows that say it, by AdamW and by Muon."""


def claims(view: View) -> Iterator[Claim]:
    """Better translations; tolerance to high learning rates; QK-Clip instead of a norm."""
    for score in CLAIMED:
        sentence = f"{score} translates better than {BASE}"
        yield _against(sentence, TRANSLATES, BLEU, score, BASE, TRANSLATION)
        sentence = f"{score} has a lower loss than {BASE}"
        yield _against(sentence, TRANSLATES, LOSS, score, BASE, TRANSLATION, sign=-1)
    for experiment, metric, sign, words in (
        (RATES, LOSS, -1, "has a lower loss"),
        (IMAGES, IMAGE_ACCURACY, 1, "is more accurate on images"),
    ):
        high = max(multiples(view, experiment), default=1.0)
        for score in scores(view, experiment) if high > 1 else ():
            if score != (base := base_of(score)):
                sentence = f"{score} at ×{high:g} of the learning rate {words} than {base}"
                yield _against(
                    sentence, _source(score), metric, score, base, experiment, high, sign
                )
    for score in scores(view, RATES):
        if score != (base := base_of(score)):
            yield _fails_less(
                f"fewer trainings fail with {score} than with {base} in the learning-rate sweep",
                _source(score),
                *(score, base),
            )
    high = max(multiples(view, RATES), default=1.0)
    for clipped, normed in CLIPPED:
        yield _fails_less(
            f"{clipped} tolerates as high a learning rate as {normed} "
            "(at least no worse: the difference is not below 0)",
            "asked here",
            *(clipped, normed),
        )
        for experiment, rate in ((RATES, high), (TRANSLATION, None)):
            rated = "" if rate is None else f"at ×{rate:g} of the learning rate "
            sentence = f"{clipped} {rated}ends at as good a loss as {normed} "
            sentence += "(at least no worse: the difference is not above 0)"
            yield _against(sentence, "asked here", LOSS, clipped, normed, experiment, rate, sign=-1)


def _source(row: str) -> str:
    return BOUNDED if CLIP in row else STABLE


def _against(
    sentence: str,
    source: str,
    metric: Metric,
    score: str,
    base: str,
    experiment: str,
    rate: float | None = None,
    sign: int = 1,
) -> Claim:
    """A score minus another in the same experiment, at the same learning rate."""
    rated = "" if rate is None else f" at ×{rate:g}"
    ours, theirs = (metric.at(at(experiment, row, rate)) for row in (score, base))
    measured = f"{score} − {base}{rated}, {metric.title}"
    return Claim(sentence, ours - theirs, source, measured, sign)


def _fails_less(sentence: str, source: str, score: str, than: str) -> Claim:
    """An exact sign test over the sweep's trainings, which were chosen and not drawn.

    Trainings of one seed at several rates are alike: with fewer than `SEEDS` there is no p.
    """

    def test(view: View) -> Estimate | None:
        only_base = only_score = pairs = 0
        seeds: set[int] = set()
        for rate in multiples(view, RATES, score):
            ours = failures(view, at(RATES, score, rate))
            base = failures(view, at(RATES, than, rate))
            for seed in ours.keys() & base.keys():
                only_base += base[seed] and not ours[seed]
                only_score += ours[seed] and not base[seed]
                pairs += 1
                seeds.add(seed)
        if not pairs:
            return None
        return Estimate(
            float(only_base - only_score),
            p=sign_test(only_base, only_score) if len(seeds) >= SEEDS else None,
            units=pairs,
            seeds=tuple(sorted(seeds)),
        )

    measured = f"trainings in which only {than} fails − only {score} (exact sign test)"
    return Claim(sentence, None, source, measured, test=test, digits=0)


# Figures

OF_RATE = "learning rate, in units of the preset's"


def figures(view: View) -> list[Figure]:
    """BLEU and loss by score, results by learning rate."""
    losses = _lines_by_rate(view, RATES, LOSS)
    guess = unigram(view)
    if guess is not None:
        level = tuple(Point(rate, guess) for rate in multiples(view, RATES))
        losses = (*losses, Line("unigram baseline", level, dashed=True))
    seen = _lines_by_rate(view, IMAGES, IMAGE_ACCURACY)
    rows = [
        Row(score, where)
        for score in scores(view, TRANSLATION)
        if view.sums(LOSS.name, where := at(TRANSLATION, score, 1.0)) is not None
    ]
    columns = [Column("bleu", BLEU.title, BLEU), Column("loss", "loss (nats)", LOSS)]
    shown = columns if len(rows) > 1 else ()  # of one score there is nothing to compare
    return [
        intervals(view, "bleu_by_score", "Translation by score", rows, shown),
        *(
            Curves(name, title, (Panel("", lines, OF_RATE, y_title, log_x=True),))
            for name, title, lines, y_title in (
                ("loss_by_learning_rate", "Test loss", losses, "nats per token"),
                ("vision_by_learning_rate", "Images: accuracy", seen, "accuracy (%)"),
            )
        ),
    ]


def _lines_by_rate(view: View, experiment: str, metric: Metric) -> tuple[Line, ...]:
    """A line for every score trained at several rates; no point where every seed ended in NaN."""
    lines = []
    for score in scores(view, experiment):
        rates = multiples(view, experiment, score)
        plotted = points(view, metric, ((x, at(experiment, score, x)) for x in rates))
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
                Row(score, at(TRANSLATION, score)) for score in scores(view, TRANSLATION)
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
                "accuracy (%), loss (nats): per image; Δ: difference to Baseline at the same "
                "learning rate, paired over images and seeds.",
                LOGIT_NOTE,
            ),
        ),
    ),
    claims=claims,
    figures=figures,
    collect=partial(measured_below, factors=("experiment",), also=largest_logits),
    variants_help="Scores, separated by commas; the sweep and the images use those of them that "
    "the preset names. [default: the preset's]",
    examples=(("--preset multi30k --corpus FOLDER", "three scores on multi30k, three seeds"),),
)
