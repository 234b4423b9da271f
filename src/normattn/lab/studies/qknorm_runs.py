"""What the QK-Norm study trains and measures: translation models and Vision Transformers.

A row of its tables is a score with additions, such as `Baseline+Muon`. Each addition is a group of
settings that override the training's: another optimiser, QK-Clip. A preset's `trained_with` changes
these groups and may add others.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import product
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import polars as pl
from pydantic import Field, field_validator

from normattn.errors import InputError, unknown_name
from normattn.io import write_json
from normattn.lab.data.images import ImageData
from normattn.lab.data.pairs import PairData
from normattn.lab.evaluation.classification import measure_images
from normattn.lab.evaluation.scorer import weights_digest
from normattn.lab.evaluation.translation import (
    corpus_counts,
    score_references,
    translate,
    unigram_loss,
)
from normattn.lab.stats import sums, with_identity
from normattn.lab.studies.preset import RISING, Positive, StudyPreset, load_preset
from normattn.lab.sweep.config import SweepConfig, merged
from normattn.lab.sweep.run import EVALUATIONS, MeasuredRun, Progress, Request, Run, Sweep
from normattn.lab.training.planning import Cost
from normattn.lab.training.tasks.classification import VisionTrainingConfig
from normattn.lab.training.tasks.translation import TranslationConfig
from normattn.models.config import without_position
from normattn.models.flops import flops_per_image
from normattn.score import ScoreSpec
from normattn.score.grammar import read
from normattn.score.parts import Part, RotaryPosition, SidedNorm, Slot, find
from normattn.settings import Settings

TRANSLATION, RATES, IMAGES = "translation", "rates", "images"
"""The experiments: a table of scores, a learning-rate sweep, the Vision Transformers."""
SCORES = (
    *("Baseline", "QKLayerNorm", "QKRMSNorm", "QLayerNorm", "QRMSNorm", "KLayerNorm", "KRMSNorm"),
    *("QNA", "KNA", "CosA", "QKNorm2020", "QKBatchNorm", "QKInstanceNorm"),
    *("Baseline+QK-Clip", "Baseline+Muon", "QKRMSNorm+Muon", "Baseline+Muon+QK-Clip"),
)
"""The rows of the table unless a preset names others."""
SWEPT = ("Baseline", "QKRMSNorm", "QKLayerNorm", "KNA", *SCORES[-4:])
"""The rows of the learning-rate sweep unless a preset names others."""
IMAGE_SCORES = (
    *("Baseline", "QKLayerNorm", "QKRMSNorm", "QNA", "KNA", "CosA", "QKNorm2020"),
    *("QKBatchNorm", "QKInstanceNorm"),
)
MULTIPLES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
ASSUMED_SIZE = 1000
"""Sentences or images that the plan assumes, as the data is not loaded yet."""

# Rows

Layer = Mapping[str, Any]
"""Settings by dotted name."""
MUON, CLIP = "Muon", "QK-Clip"
TRAINED_WITH: Mapping[str, Layer] = {
    # Muon's updates have the size of AdamW's (arXiv 2502.16982), so the learning rate stays.
    MUON: {"optimiser": {"name": "muon"}},
    # Kimi K2 uses 100 (arXiv 2507.20534); small trainings reach 30.
    CLIP: {"qk_clip": 30.0},
}
_SEPARATOR = re.compile(r"\+(?=[A-Za-z])")
"""A + before a name, unlike in `logn+` and 1e+06."""


def split_row(row: str) -> tuple[str, tuple[str, ...]]:
    """Split a row into its score and the names of its additions."""
    score, *additions = _SEPARATOR.split(row)
    return score, tuple(additions)


def rows_of(names: Sequence[str], layers: Mapping[str, Layer]) -> dict[str, tuple[Layer, ...]]:
    """The settings of each row by its printed name; `layers` are those of each addition.

    Raises `InputError` for an unknown addition, and for a score with an inference-time method.
    """
    rows: dict[str, tuple[Layer, ...]] = {}
    for name in names:
        score, additions = split_row(name)
        spec = ScoreSpec.parse(score)
        if spec.method:
            raise InputError(f"{score} holds {spec.method}, which is applied after training")
        for addition in additions:
            if addition not in layers:
                raise unknown_name("training of a row", addition, layers, f" (in {name})")
        # In the order of `layers`, so that equal rows have equal names and settings.
        ordered = [addition for addition in layers if addition in additions]
        rows["+".join((spec.text, *ordered))] = tuple(layers[addition] for addition in ordered)
    return rows


def scores_of(variant: str) -> dict[str, str]:
    """The scores of encoder, decoder and cross attention in the row `variant`, as settings.

    They are the same, except for BatchNorm and InstanceNorm, which average over the sequence. These
    would leak future tokens into the decoder, so the decoder and the queries of the cross attention
    use Baseline. The keys of the cross attention come from the source and keep their norm.
    """
    spec = ScoreSpec.parse(variant)
    if not spec.leaks_future:
        return {"model.score": variant}
    norm = spec.variant
    assert isinstance(norm, SidedNorm)
    baseline: Any = find("Baseline")()
    key_norm = baseline
    if "K" in norm.sides:
        of_keys = find(norm.name if norm.sides == "K" else norm.name.removeprefix("Q"))
        key_norm = of_keys(**{field.name: getattr(norm, field.name) for field in fields(norm)})

    def with_norm(replacement: Part) -> ScoreSpec:
        return ScoreSpec(tuple(replacement if part is norm else part for part in spec.parts))

    return {
        "model.score": variant,
        "model.decoder_score": with_norm(baseline).text,
        "model.cross_score": without_position(with_norm(key_norm)).text,
    }


# Presets


class TranslationSettings(Settings):
    """How a trained model is tested: the split, the number of sentences, and the beam search.

    The first `max_sentences` are tested (default: all). `split` applies to the images too; settings
    are chosen on "validation", tables made on "test".
    """

    split: Literal["test", "validation"] = "test"
    max_sentences: int | None = Field(default=None, ge=2)
    beam: int = Field(default=4, ge=1)
    length_penalty: float = Field(default=0.6, ge=0)
    batch: int = Field(default=64, ge=1)


class TranslationRates(Settings):
    """Which translation models are trained at which `multiples` of the learning rate.

    `training` overrides the preset's, as these trainings may be shorter. `max_sentences` of the
    test set are scored.
    """

    scores: tuple[str, ...] = SWEPT
    multiples: Annotated[tuple[Positive, ...], RISING] = MULTIPLES
    training: dict[str, Any] = Field(default_factory=dict)
    max_sentences: int | None = Field(default=None, ge=2)


class ImageRates(Settings):
    """The sweep of the Vision Transformers, in addition to the table's trainings at ×1."""

    scores: tuple[str, ...] = ()
    multiples: Annotated[tuple[Annotated[float, Field(gt=1)], ...], RISING] = MULTIPLES[1:]


class VisionSettings(Settings):
    """The Vision Transformers: `training` is a `VisionTrainingConfig` without score and seed.

    `seeds` is the number per row where --seeds is not given (None: the preset's); the sweep `rates`
    has the preset's seeds.
    """

    training: dict[str, Any]
    seeds: int | None = Field(default=None, ge=1)
    scores: tuple[str, ...] = IMAGE_SCORES
    rates: ImageRates = ImageRates()


class QKNormPreset(StudyPreset):
    """A preset of the study; `training` holds fields of `TranslationConfig`.

    Without `rates` or `vision` that experiment is skipped. `trained_with` has the settings of each
    addition of a row; they override `TRAINED_WITH`.
    """

    varied: ClassVar[Mapping[str, Any]] = {
        "model.score": "Baseline",
        "model.decoder_score": None,
        "model.cross_score": None,
    }

    scores: tuple[str, ...] = SCORES
    evaluation: TranslationSettings = TranslationSettings()
    rates: TranslationRates | None = None
    vision: VisionSettings | None = None
    trained_with: dict[str, dict[str, Any]] = Field(default_factory=dict, validate_default=True)

    @field_validator("trained_with")
    @classmethod
    def _complete(cls, value: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        return merged(TRAINED_WITH, value)


# Runs


class TranslationRun(MeasuredRun):
    """A translation model, which scores the references and, where `translated`, translates."""

    training_class: ClassVar[type[TranslationConfig]] = TranslationConfig
    record = TRANSLATION
    kind: Literal["translation"] = "translation"
    evaluation: TranslationSettings
    translated: bool

    def cost(self, config: TranslationConfig) -> Cost:
        """An estimate, as the data is not loaded yet: sentences of 16 tokens."""
        settings = self.evaluation
        tokens = 16 * (settings.max_sentences or ASSUMED_SIZE)
        return Cost(scored=tokens * (1 + settings.beam * self.translated))

    def measure(
        self, folder: Path, config: TranslationConfig, data: PairData, progress: Progress
    ) -> pl.DataFrame:
        """Score the references and, where `translated`, translate."""
        settings, model = self.evaluation, self.load_trained(folder, config)
        split = data.split(settings.split).first(settings.max_sentences)
        units = [f"{number:06}" for number in range(len(split))]
        loss, correct, tokens = score_references(
            model, split, progress=lambda done, total: progress(done, total, "references")
        )
        unigram = unigram_loss(data.train, split, data.tokeniser.vocab_size)
        scored = {"loss": loss, "accuracy": correct, "unigram_loss": unigram}
        measured = [sums(name, units, numerator, tokens) for name, numerator in scored.items()]
        decoding = ""
        if self.translated:
            beam, penalty = settings.beam, settings.length_penalty
            texts = translate(
                *(model, split, data.tokeniser),
                beam=beam,
                length_penalty=penalty,
                batch=settings.batch,
                progress=lambda done, total: progress(done, total, "translated"),
            )
            write_json(folder / EVALUATIONS / "translations.json", {"translations": texts})
            counted = corpus_counts(texts, [target for _, target in split.texts])
            signatures = (metric.signature for metric in counted.values())
            decoding = "; ".join((f"beam {beam}, length penalty {penalty:g}", *signatures))
            for name, (counts, _) in counted.items():
                # The counts of every sentence are bins of the axis "count".
                axis: Any = {"axis": "count", "edges": range(counts.shape[1])}
                measured.append(sums(name, units, counts, [1.0], **axis))
        identity = self.identity(
            str(self.factors["experiment"]),
            weights=weights_digest(model),
            data=split.fingerprint(data.fingerprint),
            split=settings.split,
            settings=decoding,
        )
        return with_identity(identity, measured)


class VisionRun(MeasuredRun):
    """A Vision Transformer, tested image by image.

    Settings are chosen on the `split` "validation", tables made on "test".
    """

    training_class: ClassVar[type[VisionTrainingConfig]] = VisionTrainingConfig
    record = IMAGES
    kind: Literal["vision"] = "vision"
    split: Literal["test", "validation"] = "test"

    def cost(self, config: VisionTrainingConfig) -> Cost:
        """An estimate, as the images are not loaded yet."""
        flops = ASSUMED_SIZE * flops_per_image(config.model).forward
        return Cost(scored=ASSUMED_SIZE * config.model.tokens, flops=flops)

    def measure(
        self, folder: Path, config: VisionTrainingConfig, data: ImageData, progress: Progress
    ) -> pl.DataFrame:
        """The loss of every image, and whether it is classified correctly."""
        model, tokens = self.load_trained(folder, config), config.model.tokens
        measured = measure_images(
            model,
            data.split(self.split),
            progress=lambda done, total: progress(done, total, "images"),
        )
        identity = self.identity(
            IMAGES,
            weights=weights_digest(model),
            data=data.fingerprint,
            split=self.split,
            length=tokens,
            train_length=tokens,
        )
        return with_identity(identity, measured)


# From a request to runs


def resolve(request: Request) -> Sweep:
    """The sweep of a request.

    `variants` are the rows; the learning-rate sweep and the Vision Transformers use those that the
    preset names too. Raises `InputError` for unknown settings and for scores that cannot be
    trained.
    """
    preset = load_preset(request, "qknorm", QKNormPreset)
    evaluation, vision, rates = preset.evaluation, preset.vision, preset.rates
    table = rows_of(request.variants or preset.scores, preset.trained_with)
    seeds, runs = request.seeds_or(preset.seeds), list[Run]()

    def add(
        kind: type[Run],
        experiment: str,
        names: Sequence[str],
        training: Layer,
        multiples: Sequence[float] = (1.0,),
        seeds: Sequence[int] = seeds,
        **fields: Any,
    ) -> None:
        """Add a run for each chosen score, multiple and seed."""
        rows = rows_of(names, preset.trained_with)
        chosen = [row for row in rows if request.variants is None or row in table]
        for seed, row, rate in product(seeds, chosen, multiples):
            run = run_of(kind, experiment, row, rows[row], training, rate, seed=seed, **fields)
            runs.append(run)

    training = preset.whole_training(TranslationConfig)
    shared: dict[str, Any] = {"training": training, "evaluation": evaluation}
    shared |= {"rates": None, "vision": None}
    fields: dict[str, Any] = {"evaluation": evaluation, "translated": True}
    add(TranslationRun, TRANSLATION, [*table], training, **fields)
    if vision is not None:
        shared["vision"], swept = vision.training, vision.rates
        fields = {"split": evaluation.split}
        image_seeds = request.seeds_or(vision.seeds or preset.seeds)
        add(VisionRun, IMAGES, vision.scores, vision.training, seeds=image_seeds, **fields)
        add(VisionRun, IMAGES, swept.scores, vision.training, swept.multiples, **fields)
    if rates is not None:
        subject = "rates.training"
        sweep_training = preset.whole_training(TranslationConfig, rates.training, subject=subject)
        shared["rates"] = {**sweep_training, "max_sentences": rates.max_sentences}
        shorter = evaluation.model_copy(update={"max_sentences": rates.max_sentences})
        fields = {"evaluation": shorter, "translated": False}
        add(TranslationRun, RATES, rates.scores, sweep_training, rates.multiples, **fields)
    return Sweep.of(request, "qknorm", SweepConfig.of(preset.name, **shared), runs)


def run_of(
    kind: type[Run],
    experiment: str,
    row: str,
    layers: Sequence[Layer],
    training: Layer,
    rate: float,
    **fields: Any,
) -> Run:
    """The run of a row in an experiment, at a multiple of its learning rate."""
    score, name = split_row(row)[0], row
    scores = scores_of(score)
    if kind is VisionRun:
        # As in ViT, positions are learned: `KNA` is trained as `KNA-NoPE`.
        names_position = any(part.slot is Slot.POSITION for part, _ in read(score)[0])
        if not names_position and isinstance(ScoreSpec.parse(score).position, RotaryPosition):
            score += "-NoPE"
        name, scores = f"vision {row}", {"model.score": score}
    settings = merged(training, *layers, scores)
    subject = f"the settings of {name}"
    config: Any = kind.training_class.parse({**settings, "seed": 0}, subject)
    factors = {
        "experiment": experiment,
        "rate": rate,
        "learning_rate": config.optimiser.lr * rate,
        **({} if config.qk_clip is None else {"qk_clip": config.qk_clip}),
    }
    return kind(
        variant=f"{name}@x{rate:g}" if experiment == RATES or rate != 1 else name,
        row=row,
        score=score,
        factors=factors,
        training=merged(settings, {"optimiser.lr": factors["learning_rate"]}),
        **fields,
    )
