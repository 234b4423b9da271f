"""The page of the QK-Norm study: translation, the learning-rate sweep, the Vision Transformers."""

from __future__ import annotations

from collections.abc import Sequence

from normattn.lab.evaluation.masked import MARGIN
from normattn.lab.report.page import Page
from normattn.lab.report.table import NOTHING, Cell, Column, Row, Table
from normattn.lab.report.view import View
from normattn.lab.stats import Metric
from normattn.lab.stats.metrics import BLEU, CHRF
from normattn.lab.studies.base import ranked
from normattn.lab.studies.qknorm.claims import claims
from normattn.lab.studies.qknorm.figures import figures
from normattn.lab.studies.qknorm.images import IMAGES
from normattn.lab.studies.qknorm.measured import (
    ACCURACY,
    BASE,
    IMAGE_ACCURACY,
    IMAGE_LOSS,
    LOSS,
    as_multiple,
    diverged,
    failures,
    largest_logit,
    last_entropy,
    multiples,
    rows_of,
    scores,
    tolerated,
    training,
    unigram,
)
from normattn.lab.studies.qknorm.rows import CLIP, MUON, parts
from normattn.lab.studies.qknorm.translation import RATES, TRANSLATION
from normattn.score import ScoreSpec

SOURCE_BLEU = (28.5, 29.2)
"""What the source reports without and with QK-Norm, on a corpus and at a size of its own."""
COMPARED = ("QKLayerNorm", "QKRMSNorm", "QKNorm2020")
"""The rows that the source's sentence speaks of; QKNorm2020 is its own form of the norm."""


def to_base(metric: Metric) -> Metric:
    """The difference to Baseline."""
    return metric - metric.at(variant=BASE)


def translation_rows(view: View) -> list[Row]:
    """A row for every score; a score that diverged with every seed too."""
    return [Row(score, rows_of(TRANSLATION, score)) for score in scores(view, TRANSLATION)]


def rate_rows(view: View) -> list[Row]:
    """A row for every score and learning rate of the sweep."""
    return _by_rate(view, RATES)


def image_rows(view: View) -> list[Row]:
    """The same of the Vision Transformers."""
    return _by_rate(view, IMAGES)


def _by_rate(view: View, experiment: str) -> list[Row]:
    return [
        Row(f"{score} ×{rate:g}", rows_of(experiment, score, rate))
        for score in scores(view, experiment)
        for rate in multiples(view, experiment, score)
    ]


def _rate(view: View, row: Row) -> Cell:
    # Of the tested models, or of the trainings that ended in NaN.
    rates = [view.one("factor.learning_rate", at) for at in (row.where, training(row.where))]
    return next((Cell(f"{rate:.3g}") for rate in rates if rate is not None), NOTHING)


def _seeds(view: View, row: Row) -> Cell:
    return Cell(" ".join(map(str, sorted(view.values("seed", row.where)))))


def _diverged(view: View, row: Row) -> Cell:
    ends = diverged(view, row.where)
    return Cell(", ".join(f"step {step} (seed {seed})" for seed, step in ends)) if ends else NOTHING


def _failed(view: View, row: Row) -> Cell:
    failed = failures(view, row.where)
    return Cell(f"{sum(failed.values())} of {len(failed)}") if failed else NOTHING


def _largest(view: View, row: Row) -> Cell:
    logit = largest_logit(view, row.where)
    return NOTHING if logit is None else Cell(f"{logit.value:.3g}", logit)


def _entropy(view: View, row: Row) -> Cell:
    entropy = last_entropy(view, row.where)
    return NOTHING if entropy is None else Cell(f"{entropy.value:.2f}", entropy)


SEEDS = Column("seeds", "seeds", plain=_seeds)
DIVERGED = Column("diverged", "diverged at", plain=_diverged)
INNER = (
    Column("largest_logit", "largest logit", plain=_largest),
    Column("last_entropy_share", "last entropy / ln n", plain=_entropy),
)

RATE = Column("learning_rate", "learning rate", plain=_rate)
FAILED = Column("failed", "failed", plain=_failed)


def _results(*statistics: Metric) -> tuple[Column, ...]:
    """Each of them, then each one's difference to Baseline."""
    changes = (Column(f"change_{s.name}", f"Δ {s.title}", to_base(s)) for s in statistics)
    return (*(Column(s.name, s.title, s) for s in statistics), *changes)


TRANSLATION_COLUMNS = (*_results(BLEU, CHRF, LOSS, ACCURACY), SEEDS, DIVERGED)
RATE_COLUMNS = (RATE, *_results(LOSS), FAILED, *INNER, SEEDS, DIVERGED)
IMAGE_COLUMNS = (RATE, *_results(IMAGE_ACCURACY, IMAGE_LOSS), *INNER, SEEDS, DIVERGED)


def _tolerated(view: View, row: Row) -> Cell:
    reached = tolerated(view, row.where["row"])
    return Cell("none" if reached is None else as_multiple(reached))


def _best(view: View, row: Row) -> Cell:
    losses = {
        rate: loss.value
        for rate in multiples(view, RATES, row.where["row"])
        if (loss := view.estimate(LOSS, rows_of(RATES, row.where["row"], rate))) is not None
    }
    return Cell(as_multiple(min(losses, key=lambda rate: losses[rate]))) if losses else NOTHING


def _tolerance_rows(view: View) -> list[Row]:
    return [Row(score, {"row": score}) for score in scores(view, RATES)]


def _source_rows(view: View) -> list[Row]:
    measured = view.values("row", {"protocol": TRANSLATION})
    return [
        Row(score, rows_of(TRANSLATION, score))
        for score in COMPARED
        if score in measured and BASE in measured
    ]


def _source(view: View, row: Row) -> Cell:
    before, after = SOURCE_BLEU
    return Cell(f"{before:g} → {after:g} ({after - before:+z.1f})")


def _translation_notes(view: View) -> Sequence[str]:
    return (
        "BLEU, chrF: of the translations by beam search, as sacrebleu computes them; of several "
        "seeds the mean of theirs.",
        "loss (nats), accuracy (%): per target token of the references, each predicted from those "
        "before it.",
        "Δ: difference to Baseline, paired over sentences and seeds.",
        *_across_tokens(view),
        *_trained_with(view, TRANSLATION),
        *(f"translated with {said}" for said in ranked(_settings(view), ())),
    )


def _across_tokens(view: View) -> Sequence[str]:
    """Where scores that read across the sequence have their norm, as far as there are any."""
    trained = (parts(row)[0] for row in scores(view, TRANSLATION))
    if not any(ScoreSpec.parse(score).leaks_future for score in trained):
        return ()
    return (
        "BatchNorm and InstanceNorm rows: in the encoder, and on the keys of the cross attention; "
        "elsewhere they would read the future, and those layers are Baseline's.",
    )


def _trained_with(view: View, experiment: str) -> Sequence[str]:
    """What the rows with a + are trained with, as far as there are any."""
    rows = scores(view, experiment)
    bounds = view.values("factor.qk_clip") if "factor.qk_clip" in view.frame.columns else []
    remarks = []
    if any(MUON in row for row in rows):
        remarks.append(
            "+Muon: Muon moves the layers' matrices and AdamW all else; a multiple of the learning "
            "rate is one of the row's own, which may differ from that of other rows."
        )
    for bound in bounds:
        if bound is not None and any(CLIP in row for row in rows):
            remarks.append(
                "+QK-Clip: after each step the query and key weights of a head whose largest logit "
                f"in it passed τ = {bound:g} are made smaller, so that it would have been τ."
            )
    return remarks


def _settings(view: View) -> list[str]:
    return [said for said in view.values("settings", {"protocol": TRANSLATION}) if said]


def _rate_notes(view: View) -> Sequence[str]:
    guess = unigram(view)
    said = "" if guess is None else f", {guess:.2f} nats"
    return (
        "loss: nats per target token of the references, after training at so many times the "
        "learning rate; Δ: difference to Baseline at the same rate.",
        f"failed: seeds that ended in NaN, or less than {MARGIN:g} nats better than the unigram "
        f"baseline, which guesses each word by its frequency in the training pairs{said}.",
        *_trained_with(view, RATES),
        *INNER_NOTES,
    )


INNER_NOTES = (
    "largest logit: of any recorded step, layer, head and seed; last entropy: of attention at the "
    "last recorded step as a share of ln n, mean over layers, heads and seeds (1: spread evenly, "
    "0: one key takes all).",
)


def _image_notes(view: View) -> Sequence[str]:
    classes = view.values("sum", {"statistic": "classes"})
    tokens = view.values("length", {"protocol": IMAGES})
    sizes = sorted(view.values("sum", {"statistic": "parameters"}))
    if not (sizes and classes and tokens):
        return INNER_NOTES
    size = " to ".join(f"{value:,.0f}" for value in dict.fromkeys((sizes[0], sizes[-1])))
    return (
        f"{classes[0]:.0f} classes, {tokens[0]} tokens an image, {size} parameters.",
        "accuracy (%), loss (nats): per image; Δ: difference to Baseline at the same learning "
        "rate, paired over images and seeds.",
        *INNER_NOTES,
    )


PAGE = Page(
    title="QK-Norm: translation and stability",
    question="Do normalised queries and keys translate better, and do they tolerate high learning "
    "rates?",
    sources=("arxiv.org/abs/2010.04245", "arxiv.org/abs/2302.05442"),
    tables=(
        Table(
            "table",
            "Translation by score",
            translation_rows,
            TRANSLATION_COLUMNS,
            notes=_translation_notes,
        ),
        Table(
            "source",
            "Beside the source's sentence: another corpus and size, not a target",
            _source_rows,
            (
                Column("without", "without: BLEU", BLEU.at(variant=BASE)),
                Column("with", "with: BLEU", BLEU),
                Column("change", "Δ BLEU", to_base(BLEU)),
                Column("source", "the source", plain=_source),
            ),
        ),
        Table(
            "tolerance",
            "Tolerance to high learning rates",
            _tolerance_rows,
            (
                Column("tolerated", "tolerates up to", plain=_tolerated),
                Column("best", "lowest loss at", plain=_best),
            ),
            intro="The highest multiple of the learning rate up to which no seed failed.",
        ),
        Table("rates", "The learning-rate sweep", rate_rows, RATE_COLUMNS, notes=_rate_notes),
        Table(
            "vision",
            "The same scores in a small Vision Transformer",
            image_rows,
            IMAGE_COLUMNS,
            notes=_image_notes,
        ),
    ),
    claims=claims,
    figures=figures,
)
