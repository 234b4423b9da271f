"""Do normalised queries and keys translate better and tolerate high learning rates? (QK-Norm)

The source claims 28.5 → 29.2 BLEU for QK-Norm in translation, and stability. Three experiments: a
translation model with each score (BLEU, chrF, loss), a learning-rate sweep (some scores at ×1 …
×32 of the learning rate: final loss, largest logit, attention entropy) and, where the preset has
them, the same scores in a small Vision Transformer (arXiv 2010.04245, 2302.05442).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl

from normattn.lab.data.pairs import PairData
from normattn.lab.diagnostics.lines import read_diagnostics
from normattn.lab.evaluation.masked import MARGIN
from normattn.lab.report.tables import Column, Row, Table, estimate_column, text_column
from normattn.lab.report.view import View
from normattn.lab.stats import Identity, Metric, identified, sums
from normattn.lab.stats.measurements import empty
from normattn.lab.stats.metrics import BLEU, CHRF
from normattn.lab.studies.base import Study
from normattn.lab.studies.lm_report import ranked
from normattn.lab.studies.preset import opened_as
from normattn.lab.studies.qknorm_report import (
    ACCURACY,
    BASE,
    CLAIMED,
    IMAGE_ACCURACY,
    IMAGE_LOSS,
    LOSS,
    at,
    by_rate,
    claims,
    diverged,
    failures,
    figures,
    largest_logit,
    last_entropy,
    multiples,
    scores,
    tolerated,
    training_of,
    unigram,
)
from normattn.lab.studies.qknorm_runs import (
    CLIP,
    IMAGES,
    MUON,
    RATES,
    TRANSLATION,
    VARIED,
    QKNormPreset,
    Rated,
    TranslationRun,
    VisionRun,
    parts,
    rows_of,
)
from normattn.lab.sweep.collect import of_trainings
from normattn.lab.sweep.config import SweepConfig, merged
from normattn.lab.sweep.run import Request, Run, Sweep
from normattn.lab.training.tasks.translation import TranslationConfig, epochs
from normattn.score import ScoreSpec


def resolve(request: Request) -> Sweep:
    """The study that a request asks for.

    `variants` are the rows; the learning-rate sweep and the Vision Transformers keep those of their
    own scores that are among them. Raises `InputError` for unknown settings, scores that cannot be
    trained, and choices that this study does not have.
    """
    preset = opened_as(request, "qknorm", QKNormPreset)
    request.refuse_choices("qknorm")
    training = _whole(preset.training, f"preset {preset.name}, training")
    vision, rates, swept = preset.vision, preset.rates, None
    rows = rows_of(request.variants or preset.scores, preset.trained_with)
    seeds = request.seeds_or(preset.seeds)
    of_images = request.seeds_or(vision.seeds if vision and vision.seeds else preset.seeds)

    def of(experiment: str, own: Sequence[str], multiples: Sequence[float]) -> list[Rated]:
        """An experiment's own scores among the rows that were chosen, at each multiple."""
        every = rows_of(own, preset.trained_with).items()
        kept = {name: row for name, row in every if request.variants is None or name in rows}
        return [Rated(experiment, *row, rate) for row in kept.items() for rate in multiples]

    def each(seeds: Sequence[int], runs: Sequence[Run]) -> list[Run]:
        return [run.model_copy(update={"seed": seed}) for seed in seeds for run in runs]

    tested = preset.evaluation
    made = each(
        seeds,
        [TranslationRun.of(Rated(TRANSLATION, *row), training, tested) for row in rows.items()],
    )
    if vision is not None:
        at_one = of(IMAGES, vision.scores, (1.0,))
        higher = of(IMAGES, vision.rates.scores, vision.rates.multiples)
        made += each(of_images, [VisionRun.of(rated, vision.training) for rated in at_one])
        made += each(seeds, [VisionRun.of(rated, vision.training) for rated in higher])
    if rates is not None:
        subject = f"preset {preset.name}, rates.training"
        over = swept = _whole(merged(preset.training, rates.training), subject)
        fewer = tested.model_copy(update={"max_sentences": rates.max_sentences})
        rated = of(RATES, rates.scores, rates.multiples)
        made += each(seeds, [TranslationRun.of(one, over, fewer) for one in rated])
    config = SweepConfig.of(
        preset.name,
        training=training,
        evaluation=tested,
        rates=swept,
        vision=vision.training if vision else None,
    )
    return Sweep.of(request, "qknorm", config, made, describe=_describe, facts=_facts(training))


def _whole(training: Mapping[str, Any], subject: str) -> dict[str, Any]:
    """The settings with every default filled in, less what the tables vary."""
    varied = {"seed": 0, "model.score": BASE}
    fields = TranslationConfig.parse(merged(training, varied), subject).model_dump(mode="json")
    del fields["seed"]
    for name in VARIED:
        del fields["model"][name]
    return fields


def _facts(training: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """What is trained on what, for the plan."""
    model, data = training["model"], training["data"]
    vocabulary = f"{data['vocab_size']:,} words"
    if data["target_vocab_size"]:
        vocabulary += f" and {data['target_vocab_size']:,} of the target's own"
    return (
        ("sentence pairs", f"{Path(data['corpus']).name}, {data['source']} → {data['target']}"),
        (
            "model",
            f"width {model['dim']}, {model['layers']} + {model['decoder_layers']} layers, "
            f"{model['heads']} heads, {model['placement']}, {vocabulary}",
        ),
        (
            "training",
            f"{training['steps']:,} steps of {training['batch_tokens']:,} padded tokens, learning "
            f"rate {training['optimiser']['lr']:g}, dropout {model['dropout']:g}, label smoothing "
            f"{training['label_smoothing']:g}",
        ),
    )


def _describe(run: Run, data: Any) -> list[str]:
    if not isinstance(data, PairData) or not isinstance(run, TranslationRun):
        return []
    config = run.training_config
    seen = f"{config.steps:,} steps see each training pair {epochs(config, data):.1f} times"
    if not run.translated:
        return [f"learning-rate sweep: {seen}"]
    return [f"corpus {config.data.corpus}: {data.facts()}", seen]


def _attention(whose: Identity, run: Path) -> pl.DataFrame:
    """By recorded step: the largest logit of any head, the entropy shares of all heads."""
    measured = []
    for line in read_diagnostics(run):
        largest, shares = line.most("largest"), line.values("entropy_share")
        if largest is not None and shares:
            at: dict[str, Any] = {"axis": "step", "edges": [float(line.step)]}
            measured.append(sums("largest_logit", [""], [[largest]], [[1.0]], **at))
            measured.append(sums("entropy_share", [""], [[sum(shares)]], [[len(shares)]], **at))
    return identified(whose, measured) if measured else empty()


# Tables

SOURCE_BLEU = (28.5, 29.2)
"""What the source reports without and with QK-Norm, on a corpus and at a size of its own."""


def to_base(metric: Metric) -> Metric:
    """The difference to Baseline."""
    return metric - metric.at(variant=BASE)


def translation_rows(view: View) -> list[Row]:
    """A row for every score; a score that diverged with every seed too."""
    return [Row(score, at(TRANSLATION, score)) for score in scores(view, TRANSLATION)]


def rated_rows(experiment: str, view: View) -> list[Row]:
    """A row for every score and learning rate of an experiment."""
    return [
        Row(f"{score} ×{rate:g}", at(experiment, score, rate))
        for score in scores(view, experiment)
        for rate in multiples(view, experiment, score)
    ]


def _learning_rate(view: View, row: Row) -> str | None:
    # Of the tested models, or of the trainings that ended in NaN.
    rates = (view.one("factor.learning_rate", at) for at in (row.where, training_of(row.where)))
    return next((f"{rate:.3g}" for rate in rates if rate is not None), None)


def _failed(view: View, row: Row) -> str | None:
    failed = failures(view, row.where)
    return f"{sum(failed.values())} of {len(failed)}" if failed else None


def _tolerated(view: View, row: Row) -> str:
    reached = tolerated(view, row.where["row"])
    return "none" if reached is None else f"×{reached:g}"


def _best(view: View, row: Row) -> str | None:
    losses = by_rate(view, LOSS, row.where["row"])
    return f"×{min(losses, key=lambda rate: losses[rate]):g}" if losses else None


def _results(*metrics: Metric) -> tuple[Column, ...]:
    """Each of them, then each one's difference to Baseline."""
    changes = (Column(f"change_{m.name}", f"Δ {m.title}", to_base(m)) for m in metrics)
    return (*(Column(m.name, m.title, m) for m in metrics), *changes)


ENDS = (
    text_column(
        "seeds",
        "seeds",
        lambda view, row: " ".join(map(str, sorted(view.values("seed", row.where)))),
    ),
    text_column(
        "diverged",
        "diverged at",
        lambda view, row: ", ".join(
            f"step {step} (seed {seed})" for seed, step in diverged(view, row.where)
        ),
    ),
)
INNER = (
    estimate_column(
        *("largest_logit", "largest logit"),
        lambda view, row: largest_logit(view, row.where),
        lambda logit: f"{logit.value:.3g}",
    ),
    estimate_column(
        *("last_entropy_share", "last entropy / ln n"),
        lambda view, row: last_entropy(view, row.where),
        lambda entropy: f"{entropy.value:.2f}",
    ),
)
RATE = text_column("learning_rate", "learning rate", _learning_rate)
FAILED = text_column("failed", "failed", _failed)


def _source_rows(view: View) -> list[Row]:
    measured = view.values("row", {"protocol": TRANSLATION})
    return [
        Row(score, at(TRANSLATION, score))
        for score in CLAIMED
        if score in measured and BASE in measured
    ]


def _translation_notes(view: View) -> Sequence[str]:
    trained = (parts(row)[0] for row in scores(view, TRANSLATION))
    leaks = any(ScoreSpec.parse(score).leaks_future for score in trained)
    across = (
        "BatchNorm and InstanceNorm rows: in the encoder, and on the keys of the cross attention; "
        "elsewhere they would read the future, and those layers are Baseline's.",
    )
    made = (said for said in view.values("settings", {"protocol": TRANSLATION}) if said)
    return (
        "BLEU, chrF: of the translations by beam search, as sacrebleu computes them; of several "
        "seeds the mean of theirs.",
        "loss (nats), accuracy (%): per target token of the references, each predicted from those "
        "before it.",
        "Δ: difference to Baseline, paired over sentences and seeds.",
        *(across if leaks else ()),
        *_trained_with(view, TRANSLATION),
        *(f"translated with {said}" for said in ranked(made, ())),
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


INNER_NOTE = (
    "largest logit: of any recorded step, layer, head and seed; last entropy: of attention at the "
    "last recorded step as a share of ln n, mean over layers, heads and seeds (1: spread evenly, "
    "0: one key takes all)."
)


def _rate_notes(view: View) -> Sequence[str]:
    guess = unigram(view)
    said = "" if guess is None else f", {guess:.2f} nats"
    return (
        "loss: nats per target token of the references, after training at so many times the "
        "learning rate; Δ: difference to Baseline at the same rate.",
        f"failed: seeds that ended in NaN, or less than {MARGIN:g} nats better than the unigram "
        f"baseline, which guesses each word by its frequency in the training pairs{said}.",
        *_trained_with(view, RATES),
        INNER_NOTE,
    )


def _image_notes(view: View) -> Sequence[str]:
    classes = view.values("sum", {"statistic": "classes"})
    tokens = view.values("length", {"protocol": IMAGES})
    sizes = sorted(view.values("sum", {"statistic": "parameters"}))
    if not (sizes and classes and tokens):
        return (INNER_NOTE,)
    size = " to ".join(f"{value:,.0f}" for value in dict.fromkeys((sizes[0], sizes[-1])))
    return (
        f"{classes[0]:.0f} classes, {tokens[0]} tokens an image, {size} parameters.",
        "accuracy (%), loss (nats): per image; Δ: difference to Baseline at the same learning "
        "rate, paired over images and seeds.",
        INNER_NOTE,
    )


STUDY = Study(
    "qknorm",
    "Do normalised queries and keys translate better, and do they tolerate high learning rates?",
    title="QK-Norm: translation and stability",
    help="Train translation models with each score, a learning-rate sweep, and small Vision "
    "Transformers; tabulate and plot.\n\n"
    "Rows are added by running it again with other --variants or --seeds on the same OUT; "
    "changing any other setting that a result depends on raises an error. BLEU needs `pip install "
    "'normattn[translation]'`, the images `normattn[vision]`.",
    sources=("arxiv.org/abs/2010.04245", "arxiv.org/abs/2302.05442"),
    resolve=resolve,
    runs=(TranslationRun, VisionRun),
    tables=(
        Table(
            "table",
            "Translation by score",
            translation_rows,
            (*_results(BLEU, CHRF, LOSS, ACCURACY), *ENDS),
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
                text_column(
                    "source",
                    "the source",
                    lambda view, row: "{:g} → {:g} ({:+z.1f})".format(
                        *SOURCE_BLEU, SOURCE_BLEU[1] - SOURCE_BLEU[0]
                    ),
                ),
            ),
        ),
        Table(
            "tolerance",
            "Tolerance to high learning rates",
            lambda view: [Row(score, {"row": score}) for score in scores(view, RATES)],
            (
                text_column("tolerated", "tolerates up to", _tolerated),
                text_column("best", "lowest loss at", _best),
            ),
            intro="The highest multiple of the learning rate up to which no seed failed.",
        ),
        Table(
            "rates",
            "The learning-rate sweep",
            partial(rated_rows, RATES),
            (RATE, *_results(LOSS), FAILED, *INNER, *ENDS),
            notes=_rate_notes,
        ),
        Table(
            "vision",
            "The same scores in a small Vision Transformer",
            partial(rated_rows, IMAGES),
            (RATE, *_results(IMAGE_ACCURACY, IMAGE_LOSS), *INNER, *ENDS),
            notes=_image_notes,
        ),
    ),
    claims=claims,
    figures=figures,
    collect=partial(of_trainings, also=_attention),
    variants_help="Scores of the table, by commas; the learning-rate sweep and the images keep "
    "theirs among them. [default: the preset's]",
    examples=(
        ("--preset smoke", "the whole path in about a minute"),
        ("", "the study itself on two cores"),
        ("--seeds 3", "with intervals over three models of each kind"),
        ("--variants Baseline,KNA --plan", "its cost"),
        ("--preset multi30k --corpus FOLDER", "three scores on multi30k, three seeds"),
    ),
)
