"""Cells of translation models: one that translates a test set, one at another learning rate."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal

import numpy as np
import polars as pl
from pydantic import Field

from normattn.io import write_json
from normattn.lab.data.pairs import PairData, PairSplit
from normattn.lab.evaluation.scorer import weights_digest
from normattn.lab.evaluation.translation import (
    Search,
    corpus_counts,
    score_references,
    translate,
    unigram_loss,
)
from normattn.lab.stats import Identity, identified, sums
from normattn.lab.studies.qknorm.rated import RatedCell
from normattn.lab.studies.qknorm.rows import Trained
from normattn.lab.sweep.layout import CellPaths
from normattn.lab.sweep.measuring import EVALUATIONS, MODEL
from normattn.lab.sweep.stages import MeasureStage, Note, Stage, TrainStage
from normattn.lab.training.distributed import choose_device
from normattn.lab.training.planning import Cost
from normattn.lab.training.tasks.translation import TranslationConfig, TranslationWorkload
from normattn.models.config import without_position
from normattn.models.pretrained import load_as
from normattn.models.translator import Translator
from normattn.score import ScoreSpec
from normattn.score.parts import Part, SidedNorm, find
from normattn.settings import Settings

TRANSLATION, RATES = "translation", "rates"
"""The experiments with translation models: the table of scores, the learning-rate sweep."""
TEXTS = "translations.json"


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
        parameters = {field.name: getattr(own, field.name) for field in fields(own)}
        keys = find(own.name if own.sides == "K" else own.name.removeprefix("Q"))(**parameters)
    return {
        "model.score": variant,
        "model.decoder_score": _with_variant(spec, plain).text,
        "model.cross_score": without_position(_with_variant(spec, keys)).text,
    }


def _with_variant(spec: ScoreSpec, variant: Part) -> ScoreSpec:
    """The score with another normalisation."""
    return ScoreSpec(tuple(variant if part is spec.variant else part for part in spec.parts))


class TranslationCell(RatedCell):
    """A translation model at `rate` times the learning rate of `training`.

    `training` is a `TranslationConfig` less scores and seed.
    """

    translated: ClassVar[bool]
    evaluation: TranslationSettings

    @property
    def workload(self) -> TranslationWorkload:
        """Translation."""
        return TranslationWorkload()

    @property
    def training_config(self) -> TranslationConfig:
        """The settings of this cell's training run."""
        return self.rated(TranslationConfig, scores_of(self.own_score))

    def stages(self, paths: CellPaths) -> list[Stage]:
        """Train, then score the references, and translate where the table shows translations."""
        config = self.training_config
        identity = replace(self.identity(self.experiment), score=str(config.model.score))
        trained = TrainStage(self.workload, config, paths.run)
        tested = TranslateStage(paths.run, config, identity, self.evaluation, self.translated)
        return [trained, tested]


class TranslateCell(TranslationCell):
    """A score of the table: trained, and its test set translated."""

    kind: Literal["translate"] = "translate"
    experiment = TRANSLATION
    translated = True


class RateCell(TranslationCell):
    """A score in the learning-rate sweep: its references are scored, nothing is translated."""

    kind: Literal["rate"] = "rate"
    experiment = RATES
    translated = False
    score: str

    @property
    def row(self) -> str:
        """The score, with what it is trained with."""
        return self.score


def rate_cells(
    rows: Iterable[Trained],
    multiples: Sequence[float],
    seeds: Sequence[int],
    training: Mapping[str, Any],
    evaluation: TranslationSettings,
) -> tuple[RateCell, ...]:
    """Every row at every multiple; a cell's directory is called `ROW@xMULTIPLE`."""
    return tuple(
        RateCell(
            variant=f"{row.name}@x{multiple:g}",
            score=row.name,
            rate=multiple,
            seed=seed,
            training=row.over(training),
            evaluation=evaluation,
        )
        for seed in seeds
        for row in rows
        for multiple in multiples
    )


@dataclass(frozen=True)
class TranslateStage(MeasureStage):
    """Read the test set with the model in `place`: score its references, and translate it.

    The translations themselves are kept beside what was measured.
    """

    phase = "evaluation"
    frame = TRANSLATION
    config: TranslationConfig
    identity: Identity
    settings: TranslationSettings
    translated: bool

    @property
    def cost(self) -> Cost:
        """Unknown before the data is read: as of a thousand sentences of 16 tokens."""
        sentences = self.settings.max_sentences or 1000
        return Cost(scored=16 * sentences * (1 + self.settings.beam * self.translated))

    def measured(self, data: PairData, note: Note) -> pl.DataFrame:
        """Every sentence, by its reference and, where it is asked for, by its translation."""
        model = load_as(Translator, self.folder / MODEL, self.config.model).to(
            choose_device(self.config.device)
        )
        split = self.settings.sentences(data)
        parts = list(self._references(model, data, split, note))
        settings = ""
        if self.translated:
            settings, counts = self._translations(model, data, split, note)
            parts += counts
        tested = replace(
            self.identity,
            split=self.settings.split,
            data=split.fingerprint(data.fingerprint),
            weights=weights_digest(model),
            settings=settings,
        )
        return identified(tested, parts)

    def _references(
        self, model: Translator, data: PairData, split: PairSplit, note: Note
    ) -> Iterator[pl.DataFrame]:
        """Of every sentence: nats and hits of the model, nats of the unigram model."""
        scored = score_references(model, split, progress=lambda n, of: note(n, of, "references"))
        unigram = unigram_loss(data.train, split, data.target_tokeniser.vocab_size)
        tokens = np.asarray(scored.tokens)
        yield sums("loss", units(split), np.asarray(scored.loss), tokens)
        yield sums("accuracy", units(split), np.asarray(scored.correct), tokens)
        yield sums("unigram_loss", units(split), unigram, tokens)

    def _translations(
        self, model: Translator, data: PairData, split: PairSplit, note: Note
    ) -> tuple[str, list[pl.DataFrame]]:
        """How it was translated and counted, and the counts behind BLEU and chrF."""
        texts = translate(
            model,
            split,
            data.target_tokeniser,
            self.settings.search,
            lambda done, total: note(done, total, "translated"),
        )
        counts = corpus_counts(texts, [target for _, target in split.texts])
        write_json(self.folder / EVALUATIONS / TEXTS, {"translations": texts})
        said = (
            f"beam {self.settings.beam}, length penalty {self.settings.length_penalty:g}",
            *counts.signatures,
        )
        return "; ".join(said), [
            _counted("bleu", units(split), counts.bleu),
            _counted("chrf", units(split), counts.chrf),
        ]


def _counted(statistic: str, units: list[str], rows: Sequence[Sequence[int]]) -> pl.DataFrame:
    """The counts of every sentence, as bins of the axis "count"."""
    counts = np.asarray(rows, np.float64)
    ones = np.ones(len(counts))
    return sums(statistic, units, counts, ones, axis="count", edges=range(counts.shape[1]))


def units(split: PairSplit) -> list[str]:
    """The names of a split's sentences: their numbers."""
    return [f"{number:06}" for number in range(len(split))]
