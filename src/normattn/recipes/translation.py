"""Cells of translation models: one that translates a test set, one that only stands its ground."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from normattn.data.pairs import PairData, PairSplit
from normattn.evaluation.fingerprints import weights_digest
from normattn.evaluation.translation import (
    ReferenceScores,
    Search,
    corpus_counts,
    score_references,
    translate,
    unigram_loss,
)
from normattn.models.pretrained import load_as
from normattn.models.translator import Translator
from normattn.models.translator_config import placeless
from normattn.recipes.layout import CellPaths
from normattn.recipes.merging import merged
from normattn.recipes.settings import Settings
from normattn.recipes.stages import Note, Stage, TrainStage
from normattn.recipes.studies import Cell
from normattn.reports.translation_record import TranslationRecord, write_translation
from normattn.score import ScoreSpec
from normattn.score.part import Part
from normattn.score.registry import find
from normattn.score.sided import SidedNorm
from normattn.training.distribution import choose_device
from normattn.training.translation import TranslationConfig, TranslationWorkload
from normattn.training.workload import MODEL, Cost

RECORD = "translation.json"


class TranslationSettings(Settings):
    """How a trained model is tested: on which pairs, how many of them, and by which beam search.

    `max_sentences` takes the first so many of the split (default: all). Settings are chosen on
    "validation", tables made on "test".
    """

    split: Literal["test", "validation"] = "test"
    max_sentences: int | None = Field(default=None, ge=2)
    beam: int = Field(default=4, ge=1)
    length_penalty: float = Field(default=0.6, ge=0)
    batch: int = Field(default=64, ge=1)

    def sentences(self, data: PairData) -> PairSplit:
        """The pairs that are read."""
        return data.split(self.split).first(self.max_sentences)

    @property
    def search(self) -> Search:
        """The beam search."""
        return Search(self.beam, self.length_penalty, self.batch)


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
        parameters = {each.name: getattr(own, each.name) for each in fields(own)}
        keys = find(own.name if own.sides == "K" else own.name.removeprefix("Q"))(**parameters)
    return {
        "model.score": variant,
        "model.decoder_score": _text(_with_variant(spec, plain)),
        "model.cross_score": _text(placeless(_with_variant(spec, keys))),
    }


def _with_variant(spec: ScoreSpec, variant: Part) -> ScoreSpec:
    """The score with another normalisation."""
    return ScoreSpec(tuple(variant if part is spec.variant else part for part in spec.parts))


def _text(spec: ScoreSpec) -> str:
    return str(spec).partition("@")[0]


class TranslationCell(Cell):
    """A translation model; `training` is a `TranslationConfig` less scores and seed."""

    training: dict[str, Any]
    evaluation: TranslationSettings

    @property
    @abstractmethod
    def changes(self) -> Mapping[str, Any]:
        """What this cell lays over the shared settings."""

    @property
    def workload(self) -> TranslationWorkload:
        """Translation."""
        return TranslationWorkload()

    @property
    def training_config(self) -> TranslationConfig:
        """The settings of this cell's training run."""
        fields = merged(self.training, {"seed": self.seed, **self.changes})
        return TranslationConfig.parse(fields, f"the settings of {self.name}")

    def _training(self, place: Path, *, essential: bool = True) -> TrainStage:
        return TrainStage(self.workload, self.training_config, place, essential=essential)


class TranslateCell(TranslationCell):
    """A score of the table: trained, and its test set translated."""

    kind: Literal["translate"] = "translate"

    @property
    def changes(self) -> Mapping[str, Any]:
        """The scores of the three kinds of attention."""
        return scores_of(self.variant)

    def stages(self, paths: CellPaths) -> list[Stage]:
        """Train, then translate."""
        config = self.training_config
        tested = TranslateStage(config, paths.run, self.variant, self.evaluation, translated=True)
        return [self._training(paths.run), tested]


class LadderCell(TranslationCell):
    """A score at `rate` times the learning rate: does the training hold?

    Its references are scored as the table's are, but nothing is translated.
    """

    kind: Literal["ladder"] = "ladder"
    score: str
    rate: float = Field(gt=0)

    @property
    def changes(self) -> Mapping[str, Any]:
        """The score, and the learning rate."""
        rate = float(self.training["optimiser"]["lr"]) * self.rate
        return {**scores_of(self.score), "optimiser.lr": rate}

    def stages(self, paths: CellPaths) -> list[Stage]:
        """Train, then score the references."""
        config = self.training_config
        tested = TranslateStage(config, paths.run, self.score, self.evaluation, translated=False)
        return [self._training(paths.run), tested]


def ladder_cells(
    scores: Sequence[str],
    rates: Sequence[float],
    seeds: Sequence[int],
    training: Mapping[str, Any],
    evaluation: TranslationSettings,
) -> tuple[LadderCell, ...]:
    """Every score at every rate; a cell's directory is called `SCORE@xRATE`."""
    return tuple(
        LadderCell(
            variant=f"{score}@x{rate:g}",
            score=score,
            rate=rate,
            seed=seed,
            training=dict(training),
            evaluation=evaluation,
        )
        for seed in seeds
        for score in scores
        for rate in rates
    )


@dataclass(frozen=True)
class TranslateStage(Stage):
    """Read the test set with the model in `place`: score its references, and translate it."""

    phase = "evaluation"
    config: TranslationConfig
    place: Path
    score: str
    settings: TranslationSettings
    translated: bool

    @property
    def cost(self) -> Cost:
        """Unknown before the data is read: as of a thousand sentences of 16 tokens."""
        sentences = self.settings.max_sentences or 1000
        return Cost(scored=16 * sentences * (1 + self.settings.beam * self.translated))

    def is_done(self) -> bool:
        """Whether the record is there."""
        return (self.place / RECORD).is_file()

    def run(self, data: PairData, note: Note) -> str | None:
        """Translate and score, unless it is on record."""
        if self.is_done():
            return None
        model = load_as(Translator, self.place / MODEL, self.config.model).to(
            choose_device(self.config.device)
        )
        split = self.settings.sentences(data)
        scored = score_references(model, split, progress=lambda n, of: note(n, of, "references"))
        fields = self._translated(model, data, split, note) if self.translated else {}
        record = TranslationRecord(
            variant=self.score,
            spec=str(model.config.score),
            seed=self.config.seed,
            weights=weights_digest(model),
            data=split.fingerprint(data.fingerprint),
            split=self.settings.split,
            unigram=unigram_loss(data.train, split, data.target_tokeniser.vocab_size),
            **_reference_fields(scored),
            **fields,
        )
        write_translation(self.place / RECORD, record)
        return None

    def _translated(
        self, model: Translator, data: PairData, split: PairSplit, note: Note
    ) -> dict[str, Any]:
        texts = translate(
            model,
            split,
            data.target_tokeniser,
            self.settings.search,
            lambda done, total: note(done, total, "translated"),
        )
        counts = corpus_counts(texts, [target for _, target in split.texts])
        return {
            "beam": self.settings.beam,
            "length_penalty": self.settings.length_penalty,
            "signatures": counts.signatures,
            "translations": tuple(texts),
            "bleu": counts.bleu,
            "chrf": counts.chrf,
        }


def _reference_fields(scored: ReferenceScores) -> dict[str, Any]:
    return {"loss": scored.loss, "correct": scored.correct, "tokens": scored.tokens}
