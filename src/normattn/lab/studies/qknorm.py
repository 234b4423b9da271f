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
from normattn.lab.studies.preset import opened_as, refuse_varied, shared_training
from normattn.lab.studies.qknorm_report import (
    ACCURACY,
    BASE,
    IMAGE_ACCURACY,
    IMAGE_LOSS,
    LOSS,
    at,
    claims,
    failures,
    figures,
    largest_logit,
    last_entropy,
    multiples,
    scores,
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
    AnyRun,
    Layer,
    QKNormPreset,
    TranslationRun,
    VisionRun,
    parts,
    rows_of,
    run_of,
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
    subject, known = f"preset {preset.name}", preset.trained_with
    for name, layer in known.items():
        refuse_varied(layer, VARIED, f"{subject}, trained_with.{name}")
    table = rows_of(request.variants or preset.scores, known)
    seeds = request.seeds_or(preset.seeds)

    def runs(
        kind: type[AnyRun],
        experiment: str,
        own: Sequence[str],
        training: Layer,
        multiples: Sequence[float] = (1.0,),
        seeds: Sequence[int] = seeds,
        **more: Any,
    ) -> list[AnyRun]:
        """A run of each of the scores that were chosen, at each multiple, with each seed."""
        rows = rows_of(own, known).items()
        made = [
            run_of(kind, experiment, row, layers, training, rate, **more)
            for row, layers in rows
            if request.variants is None or row in table
            for rate in multiples
        ]
        return [run.model_copy(update={"seed": seed}) for seed in seeds for run in made]

    def whole(training: Layer, name: str) -> dict[str, Any]:
        fill = {"model.score": BASE}
        return shared_training(TranslationConfig, training, VARIED, f"{subject}, {name}", fill)

    training, tested = whole(preset.training, "training"), preset.evaluation
    translate = partial(runs, TranslationRun, TRANSLATION, list(table), training)
    made: list[Run] = [*translate(evaluation=tested, translated=True)]
    if (vision := preset.vision) is not None:
        refuse_varied(vision.training, VARIED, f"{subject}, vision.training")
        of_images = request.seeds_or(vision.seeds or preset.seeds)
        images = partial(runs, VisionRun, IMAGES, training=vision.training)
        made += images(vision.scores, seeds=of_images)
        made += images(vision.rates.scores, multiples=vision.rates.multiples)
    swept = None
    if (rates := preset.rates) is not None:
        swept = whole(merged(preset.training, rates.training), "rates.training")
        fewer = tested.model_copy(update={"max_sentences": rates.max_sentences})
        sweep = partial(runs, TranslationRun, RATES, rates.scores, swept, rates.multiples)
        made += sweep(evaluation=fewer, translated=False)
    config = SweepConfig.of(
        preset.name,
        training=training,
        evaluation=tested,
        rates=swept,
        vision=vision.training if vision else None,
    )
    return Sweep.of(request, "qknorm", config, made, describe=_describe, facts=_facts(training))


def _facts(training: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """What is trained on what, for the plan."""
    model, data, rate = training["model"], training["data"], training["optimiser"]["lr"]
    layers = f"{model['layers']} + {model['decoder_layers']} layers, {model['heads']} heads"
    steps = f"{training['steps']:,} steps of {training['batch_tokens']:,} padded tokens"
    return (
        ("sentence pairs", f"{Path(data['corpus']).name}, {data['source']} → {data['target']}"),
        ("model", f"width {model['dim']}, {layers}, {model['placement']}"),
        ("training", f"{steps}, learning rate {rate:g}, dropout {model['dropout']:g}"),
    )


def _describe(run: Run, data: Any) -> list[str]:
    if not isinstance(data, PairData) or not isinstance(run, TranslationRun):
        return []
    config = run.training_config
    seen = f"{config.steps:,} steps see each training pair {epochs(config, data):.1f} times"
    if not run.translated:
        return [f"learning-rate sweep: {seen}"]
    return [f"corpus {config.data.corpus}: {data.facts()}", seen]


def attention_by_step(whose: Identity, run: Path) -> pl.DataFrame:
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


def _diverged(view: View, row: Row) -> str:
    """The step and the seed of each training that ended in NaN."""
    ended = {**training_of(row.where), "statistic": "diverged"}
    steps = {seed: view.one("bin", {**ended, "seed": seed}) for seed in view.values("seed", ended)}
    return ", ".join(f"step {steps[seed]:.0f} (seed {seed})" for seed in sorted(steps))


def _results(*metrics: Metric) -> tuple[Column, ...]:
    """Each of them, then each one's difference to Baseline."""
    changes = (Column(f"change_{m.name}", f"Δ {m.title}", m - m.at(variant=BASE)) for m in metrics)
    return (*(Column(m.name, m.title, m) for m in metrics), *changes)


ENDS = (
    text_column(
        "seeds",
        "seeds",
        lambda view, row: " ".join(map(str, sorted(view.values("seed", row.where)))),
    ),
    text_column("diverged", "diverged at", _diverged),
)
INNER = (
    estimate_column("largest_logit", "largest logit", largest_logit, lambda e: f"{e.value:.3g}"),
    estimate_column(
        "last_entropy_share", "last entropy / ln n", last_entropy, lambda e: f"{e.value:.2f}"
    ),
)
RATE = text_column("learning_rate", "learning rate", _learning_rate)
FAILED = text_column("failed", "failed", _failed)


def _translation_notes(view: View) -> Sequence[str]:
    trained = (parts(row)[0] for row in scores(view, TRANSLATION))
    leaks = any(ScoreSpec.parse(score).leaks_future for score in trained)
    across = (
        "BatchNorm and InstanceNorm rows: in the encoder, and on the keys of the cross attention; "
        "elsewhere they would read the future, and those layers are Baseline's.",
    )
    made = (each for each in view.values("settings", {"protocol": TRANSLATION}) if each)
    return (
        "BLEU, chrF: of the translations by beam search, as sacrebleu computes them; of several "
        "seeds the mean of theirs.",
        "loss (nats), accuracy (%): per target token of the references, each predicted from those "
        "before it.",
        "Δ: difference to Baseline, paired over sentences and seeds.",
        *(across if leaks else ()),
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


INNER_NOTE = (
    "largest logit: of any recorded step, layer, head and seed; last entropy: of attention at the "
    "last recorded step as a share of ln n, mean over layers, heads and seeds (1: spread evenly, "
    "0: one key takes all)."
)


def _rate_notes(view: View) -> Sequence[str]:
    guess = unigram(view)
    nats = "" if guess is None else f", {guess:.2f} nats"
    return (
        "loss: nats per target token of the references, after training at so many times the "
        "learning rate; Δ: difference to Baseline at the same rate.",
        f"failed: seeds that ended in NaN, or less than {MARGIN:g} nats better than the unigram "
        f"baseline, which guesses each word by its frequency in the training pairs{nats}.",
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
            lambda view: [
                Row(score, at(TRANSLATION, score)) for score in scores(view, TRANSLATION)
            ],
            (*_results(BLEU, CHRF, LOSS, ACCURACY), *ENDS),
            notes=_translation_notes,
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
    collect=partial(of_trainings, also=attention_by_step),
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
