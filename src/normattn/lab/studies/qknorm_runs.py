"""What the QK-Norm study trains and measures: translation models and Vision Transformers.

A row of its tables is a score, and what else its models are trained with, as `Baseline+Muon`.
Each name after a + is that of settings, which are laid over the training's: another optimiser,
QK-Clip. A preset's `trained_with` changes what they are, and may add others.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import polars as pl
from pydantic import Field, field_validator

from normattn.errors import InputError, unknown_name
from normattn.io import write_json
from normattn.lab.data.images import ImageData
from normattn.lab.data.pairs import PairData, PairSplit
from normattn.lab.evaluation.classification import measure_images
from normattn.lab.evaluation.scorer import weights_digest
from normattn.lab.evaluation.translation import (
    corpus_counts,
    score_references,
    translate,
    unigram_loss,
)
from normattn.lab.stats import identified, sums
from normattn.lab.studies.preset import StudyPreset, opened
from normattn.lab.sweep.config import SweepConfig, merged
from normattn.lab.sweep.run import EVALUATIONS, MeasuredRun, Note, Request, Run, Sweep
from normattn.lab.training.planning import Cost
from normattn.lab.training.tasks.classification import VisionTrainingConfig
from normattn.lab.training.tasks.translation import TranslationConfig
from normattn.models.config import without_position
from normattn.models.flops import flops_per_image
from normattn.models.translator import Translator
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
GUESSED = 1000
"""Sentences or images of data that has not been read yet, for the plan."""

# Rows

Layer = Mapping[str, Any]
"""Settings by name."""
MUON, CLIP = "Muon", "QK-Clip"
TRAINED_WITH: Mapping[str, Layer] = {
    # The steps of its matrices have the size of AdamW's (arXiv 2502.16982): the same learning rate.
    MUON: {"optimiser": {"name": "muon"}},
    # 100 at the size of Kimi K2; a bound that is reached in small trainings (arXiv 2507.20534).
    CLIP: {"qk_clip": 30.0},
}
_JOINT = re.compile(r"\+(?=[A-Za-z])")
"""A + before a name: that of `logn+` and of 1e+06 joins nothing."""


def parts(row: str) -> tuple[str, tuple[str, ...]]:
    """A row's score and what its models are trained with, as they are called."""
    score, *others = _JOINT.split(row)
    return score, tuple(others)


def rows_of(names: Sequence[str], known: Mapping[str, Layer]) -> dict[str, tuple[Layer, ...]]:
    """The settings of each row by its printed name, in this order.

    Raises `InputError` for what is not `known`, and for a score with a method: it is applied after
    training.
    """
    rows: dict[str, tuple[Layer, ...]] = {}
    for name in names:
        score, others = parts(name)
        spec = ScoreSpec.parse(score)
        if spec.method:
            raise InputError(f"{score} holds {spec.method}, which is applied after training")
        for other in others:
            if other not in known:
                raise unknown_name("training of a row", other, known, f" (in {name})")
        # In the order of `known`: one row has one name, and the same settings come last.
        ordered = [other for other in known if other in others]
        rows["+".join((spec.text, *ordered))] = tuple(known[other] for other in ordered)
    return rows


def scores_of(variant: str) -> dict[str, str]:
    """The scores of encoder, decoder and cross attention in the row `variant`, as settings.

    One score everywhere, where that can be. BatchNorm and InstanceNorm read across the sequence:
    the decoder, which they would show the future, keeps Baseline, and so do the queries of the
    cross attention, which are the decoder's; its keys are the source's and keep their norm.
    """
    spec = ScoreSpec.parse(variant)
    if not spec.leaks_future:
        return {"model.score": variant}
    own = spec.variant
    assert isinstance(own, SidedNorm)
    plain: Any = find("Baseline")()
    keys = plain
    if "K" in own.sides:
        parameters = {field.name: getattr(own, field.name) for field in fields(own)}
        keys = find(own.name if own.sides == "K" else own.name.removeprefix("Q"))(**parameters)

    def with_variant(other: Part) -> ScoreSpec:
        return ScoreSpec(tuple(other if part is own else part for part in spec.parts))

    return {
        "model.score": variant,
        "model.decoder_score": with_variant(plain).text,
        "model.cross_score": without_position(with_variant(keys)).text,
    }


def vision_score(score: str) -> str:
    """The score as a Vision Transformer is trained with it.

    As in ViT the model learns positions (`KNA` is trained as `KNA-NoPE`), unless the score names
    one.
    """
    named = any(part.slot is Slot.POSITION for part, _ in read(score)[0])
    rotary = isinstance(ScoreSpec.parse(score).position, RotaryPosition)
    return f"{score}-NoPE" if rotary and not named else score


# Presets


class TranslationSettings(Settings):
    """How a trained model is tested: on which pairs, how many of them, by which beam search.

    Images are those of the same split. `max_sentences` takes the first so many of the split
    (default: all). Settings are chosen on "validation", tables made on "test".
    """

    split: Literal["test", "validation"] = "test"
    max_sentences: int | None = Field(default=None, ge=2)
    beam: int = Field(default=4, ge=1)
    length_penalty: float = Field(default=0.6, ge=0)
    batch: int = Field(default=64, ge=1)


class Rates(Settings):
    """Which `scores` are trained at which `multiples` of the learning rate."""

    scores: tuple[str, ...] = SWEPT
    multiples: tuple[Annotated[float, Field(gt=0)], ...] = MULTIPLES

    @field_validator("multiples")
    @classmethod
    def _rising(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        if not value or list(value) != sorted(set(value)):
            raise ValueError(f"multiples must rise, got {list(value)}")
        return value


class TranslationRates(Rates):
    """The sweep of the translation models.

    `training` is laid over the preset's: these trainings may be shorter. `max_sentences` of the
    test set are read at the end.
    """

    training: dict[str, Any] = Field(default_factory=dict)
    max_sentences: int | None = Field(default=None, ge=2)


class ImageRates(Rates):
    """The sweep of the Vision Transformers, besides the table's trainings at ×1."""

    scores: tuple[str, ...] = ()
    multiples: tuple[Annotated[float, Field(gt=1)], ...] = MULTIPLES[1:]


class VisionSettings(Settings):
    """The Vision Transformers: `training` is a `VisionTrainingConfig` less score and seed.

    `seeds` says how many are trained of each row, where --seeds does not (None: as many as of the
    tables); the sweep `rates` has the tables' seeds.
    """

    training: dict[str, Any]
    seeds: int | None = Field(default=None, ge=1)
    scores: tuple[str, ...] = IMAGE_SCORES
    rates: ImageRates = ImageRates()


class QKNormPreset(StudyPreset):
    """One whole setting of the study; `training` holds fields of `TranslationConfig`.

    Without `rates` or `vision` that part is left out. `trained_with`: the settings behind each name
    that a row may add to its score with a +, laid over `TRAINED_WITH`.
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

    @property
    def layers(self) -> dict[str, Mapping[str, Any]]:
        """Those of every experiment, and those that rows add."""
        experiments = {"rates": self.rates, "vision": self.vision}
        return {
            **super().layers,
            **{f"{name}.training": each.training for name, each in experiments.items() if each},
            **{f"trained_with.{name}": layer for name, layer in self.trained_with.items()},
        }


# Runs


class TranslationRun(MeasuredRun):
    """A translation model, whose test set is scored and, where `translated`, translated."""

    training_class: ClassVar[type[TranslationConfig]] = TranslationConfig
    record = TRANSLATION
    kind: Literal["translation"] = "translation"
    evaluation: TranslationSettings
    translated: bool

    def cost(self, config: TranslationConfig) -> Cost:
        """Unknown before the data is read: as of sentences of 16 tokens."""
        settings = self.evaluation
        tokens = 16 * (settings.max_sentences or GUESSED)
        return Cost(scored=tokens * (1 + settings.beam * self.translated))

    def measure(
        self, folder: Path, config: TranslationConfig, data: PairData, note: Note
    ) -> pl.DataFrame:
        """The scores of the references, and where the table shows them the translations."""
        settings, model = self.evaluation, self.model_in(folder, config)
        split = data.split(settings.split).first(settings.max_sentences)
        units = [f"{number:06}" for number in range(len(split))]
        measured, made = [*_references(model, data, split, units, note)], ""
        if self.translated:
            texts, made, counts = self._translations(model, data, split, units, note)
            write_json(folder / EVALUATIONS / "translations.json", {"translations": texts})
            measured += counts
        whose = self.identity(
            str(self.factors["experiment"]),
            weights=weights_digest(model),
            data=split.fingerprint(data.fingerprint),
            split=settings.split,
            settings=made,
        )
        return identified(whose, measured)

    def _translations(
        self, model: Translator, data: PairData, split: PairSplit, units: list[str], note: Note
    ) -> tuple[list[str], str, list[pl.DataFrame]]:
        """The translations, how they were made and counted, the counts behind BLEU and chrF."""
        beam, penalty = self.evaluation.beam, self.evaluation.length_penalty
        texts = translate(
            model,
            split,
            data.tokeniser,
            beam=beam,
            length_penalty=penalty,
            batch=self.evaluation.batch,
            progress=lambda done, total: note(done, total, "translated"),
        )
        counted = corpus_counts(texts, [target for _, target in split.texts])
        signatures = (metric.signature for metric in counted.values())
        made = "; ".join((f"beam {beam}, length penalty {penalty:g}", *signatures))
        # The counts of every sentence are bins of the axis "count".
        measured = [
            sums(name, units, counts, [1.0], axis="count", edges=range(counts.shape[1]))
            for name, (counts, _) in counted.items()
        ]
        return texts, made, measured


def _references(
    model: Translator, data: PairData, split: PairSplit, units: list[str], note: Note
) -> Iterator[pl.DataFrame]:
    """Of every sentence: nats and hits of the model, nats of the unigram model."""
    loss, correct, tokens = score_references(
        model, split, progress=lambda n, of: note(n, of, "references")
    )
    yield sums("loss", units, loss, tokens)
    yield sums("accuracy", units, correct, tokens)
    unigram = unigram_loss(data.train, split, data.tokeniser.vocab_size)
    yield sums("unigram_loss", units, unigram, tokens)


class VisionRun(MeasuredRun):
    """A Vision Transformer, tested image by image.

    `split` are the images that are tested: settings are chosen on "validation", tables made on
    "test".
    """

    training_class: ClassVar[type[VisionTrainingConfig]] = VisionTrainingConfig
    record = IMAGES
    kind: Literal["vision"] = "vision"
    split: Literal["test", "validation"] = "test"

    def cost(self, config: VisionTrainingConfig) -> Cost:
        """Unknown before the images are read."""
        flops = GUESSED * flops_per_image(config.model).forward
        return Cost(scored=GUESSED * config.model.tokens, flops=flops)

    def measure(
        self, folder: Path, config: VisionTrainingConfig, data: ImageData, note: Note
    ) -> pl.DataFrame:
        """Loss and correctness of every image."""
        model = self.model_in(folder, config)
        split = data.split(self.split)
        measured = measure_images(
            model, split, progress=lambda done, total: note(done, total, "images")
        )
        whose = self.identity(
            IMAGES,
            weights=weights_digest(model),
            data=data.fingerprint,
            split=self.split,
            length=config.model.tokens,
            train_length=config.model.tokens,
        )
        return identified(whose, measured)


# From a request to runs


def resolve(request: Request) -> Sweep:
    """The study that a request asks for.

    `variants` are the rows; the learning-rate sweep and the Vision Transformers keep those of their
    own scores that are among them. Raises `InputError` for unknown settings and for scores that
    cannot be trained.
    """
    preset = opened(request, "qknorm", QKNormPreset)
    known, tested, vision, rates = (
        *(preset.trained_with, preset.evaluation, preset.vision, preset.rates),
    )
    table = rows_of(request.variants or preset.scores, known)
    seeds, made = request.seeds_or(preset.seeds), list[Run]()

    def add(
        kind: type[Run],
        experiment: str,
        names: Sequence[str],
        training: Layer,
        multiples: Sequence[float] = (1.0,),
        seeds: Sequence[int] = seeds,
        **own: Any,
    ) -> None:
        """A run of each of the scores that were chosen, at each multiple, with each seed."""
        runs = [
            run_of(kind, experiment, row, layers, training, rate, **own)
            for row, layers in rows_of(names, known).items()
            if request.variants is None or row in table
            for rate in multiples
        ]
        made.extend(run.model_copy(update={"seed": seed}) for seed in seeds for run in runs)

    training = preset.whole_training(TranslationConfig)
    own: dict[str, Any] = {"evaluation": tested, "translated": True}
    add(TranslationRun, TRANSLATION, [*table], training, **own)
    if vision is not None:
        of_images = request.seeds_or(vision.seeds or preset.seeds)
        own = {"split": tested.split}
        add(VisionRun, IMAGES, vision.scores, vision.training, seeds=of_images, **own)
        add(VisionRun, IMAGES, vision.rates.scores, vision.training, vision.rates.multiples, **own)
    swept = None
    if rates is not None:
        swept = preset.whole_training(TranslationConfig, rates.training, subject="rates.training")
        fewer = tested.model_copy(update={"max_sentences": rates.max_sentences})
        own = {"evaluation": fewer, "translated": False}
        add(TranslationRun, RATES, rates.scores, swept, rates.multiples, **own)
    config = SweepConfig.of(
        preset.name,
        training=training,
        evaluation=tested,
        rates=swept,
        vision=vision.training if vision else None,
    )
    return Sweep.of(request, "qknorm", config, made)


def run_of(
    kind: type[Run],
    experiment: str,
    row: str,
    layers: Sequence[Layer],
    training: Layer,
    rate: float,
    **own: Any,
) -> Run:
    """The run of a row in an experiment, for seed 0, at a multiple of its own learning rate."""
    score, name = parts(row)[0], row
    scores = scores_of(score)
    if kind is VisionRun:
        score, name = vision_score(score), f"vision {row}"
        scores = {"model.score": score}
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
        seed=0,
        factors=factors,
        training=merged(settings, {"optimiser.lr": factors["learning_rate"]}),
        **own,
    )
