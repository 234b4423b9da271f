"""Training encoder–decoders to translate."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import Field

from normattn.errors import InputError
from normattn.lab.data.pairs import (
    EOS_ID,
    PAD_ID,
    TOKENISER,
    PairBatches,
    PairData,
    PairsConfig,
    prepare_pairs,
)
from normattn.lab.training.tasks.base import Loss, ModelTrainingConfig
from normattn.models.config import TranslatorConfig
from normattn.models.flops import translator_flops
from normattn.models.translator import Translator
from normattn.score import ScoreSpec

NOMINAL_LENGTH = 16
"""Tokens of a sentence that a run's cost assumes before its data is read."""


class TranslationConfig(ModelTrainingConfig):
    """A translation model, its sentence pairs, and how it is trained.

    model: as `TranslatorConfig`; its vocabularies are those of `data` and may be left out, and so
    may its train_length, which is then `data.max_length`. batch_tokens: padded source and target
    tokens of an optimiser step, over all processes and micro-batches (of which there may be 1, 2, 4
    or 8 together). label_smoothing: as in arXiv 1512.00567, in training only. The tokeniser is left
    in the run's directory.
    """

    kind: ClassVar[str] = "translation"
    model_class: ClassVar[Any] = Translator
    prepare_data: ClassVar[Any] = staticmethod(prepare_pairs)

    model: TranslatorConfig
    data: PairsConfig = PairsConfig()
    batch_tokens: int = Field(default=4096, ge=1, le=10**8)
    label_smoothing: float = Field(default=0.1, ge=0.0, lt=1.0)

    @property
    def scores(self) -> tuple[ScoreSpec, ...]:
        """The encoder's, the decoder's and those of the attention across."""
        scores = (self.model.score, self.model.decoder_score, self.model.cross_score)
        return tuple(score for score in scores if score is not None)

    @classmethod
    def decided(cls, data: Any) -> dict[str, Any]:
        """Both languages share the tokeniser's vocabulary."""
        size = data.vocab_size
        return {"source_vocab": size, "target_vocab": size, "shared_vocabulary": True}

    @classmethod
    def suggested(cls, data: Any, given: Mapping[str, Any]) -> dict[str, Any]:
        """Sentences are no longer than `max_length`."""
        return {"train_length": data.max_length}

    def check(self, data: PairData, shards: int) -> None:
        """The longest pairs must fit into a batch, and the batch must divide."""
        self.batches(data, 0).batch(1, 0, shards)

    def batches(self, data: PairData, seed: int) -> PairBatches:
        """Sentence pairs of like length together."""
        if not len(data.train):
            raise InputError(f"corpus {self.data.corpus!r} has no pair left to train on")
        return PairBatches(data.train, self.batch_tokens, seed)

    def loss(self, model: Any, batch: Any, shards: int) -> Loss:
        """Smoothed loss, plain loss (nats) and accuracy, each a mean over the whole batch's tokens.

        A shard is weighted by its tokens, so that the mean over shards is that of the batch.
        """
        real, target = (batch.target[:, 1:] != PAD_ID).sum(), batch.target
        if not real:  # A shard that only fills up: some loss that counts nothing.
            target = torch.full_like(target, EOS_ID)
        result = model.loss(batch.source, target, self.label_smoothing)
        parts = shards / batch.targets.double()
        weight = (real * parts).to(result.loss.dtype)
        return result.loss * weight, {
            "nll": result.nll * weight,
            "accuracy": torch.minimum(result.correct, real) * parts,
        }

    def tokens_per_step(self, batches: Any) -> int:
        """Tokens to predict in a step, on average: batches differ a little."""
        tokens: int = batches.split.target_total
        return round(tokens / len(batches))

    def work(self) -> tuple[int, float]:
        """As of full batches of sentences of `NOMINAL_LENGTH`: the data is not looked at."""
        pairs = self.batch_tokens / (2 * NOMINAL_LENGTH)
        flops = translator_flops(self.model, NOMINAL_LENGTH, NOMINAL_LENGTH).training
        return round(pairs * NOMINAL_LENGTH), pairs * flops

    def leave(self, data: PairData, out: Path) -> None:
        """The tokeniser."""
        data.tokeniser.save(out / TOKENISER)
