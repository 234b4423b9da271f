"""Train encoder–decoder models to translate."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from pydantic import Field

from normattn.errors import InputError
from normattn.lab.data.pairs import (
    EOS_ID,
    PAD_ID,
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
"""Tokens of a sentence for cost estimates."""


class TranslationConfig(ModelTrainingConfig):
    """A translation model, its sentence pairs, and how it is trained.

    - model: as `TranslatorConfig`. The vocabularies follow from `data` and may be left out;
      train_length defaults to `data.max_length`.
    - batch_tokens: padded source and target tokens of an optimiser step, over all processes and
      micro-batches (1, 2, 4 or 8 together).
    - label_smoothing: as in arXiv 1512.00567, in training only.

    The run's directory gets the tokeniser.
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
        """The scores of the encoder, the decoder and cross-attention."""
        scores = (self.model.score, self.model.decoder_score, self.model.cross_score)
        return tuple(score for score in scores if score is not None)

    @classmethod
    def from_data(cls, data: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the shared vocabulary's size, and `max_length` as the default training length."""
        vocabularies = {"source_vocab": data.vocab_size, "target_vocab": data.vocab_size}
        return {**vocabularies, "shared_vocabulary": True}, {"train_length": data.max_length}

    def batches(self, data: PairData, seed: int) -> PairBatches:
        """Return batches of sentence pairs of similar length."""
        if not len(data.train):
            raise InputError(f"corpus {self.data.corpus!r} has no pair left to train on")
        return PairBatches(data.train, self.batch_tokens, seed)

    def loss(self, model: Any, batch: Any, shards: int) -> Loss:
        """Return the smoothed loss, and the plain loss (nats) and accuracy, means over tokens.

        A shard is weighted by its tokens, so that the mean over shards equals the batch's.
        """
        tokens, target = (batch.target[:, 1:] != PAD_ID).sum(), batch.target
        if not tokens:  # A shard of filler rows: any loss, with weight 0.
            target = torch.full_like(target, EOS_ID)
        result = model.loss(batch.source, target, self.label_smoothing)
        token_weight = shards / batch.targets.double()
        weight = (tokens * token_weight).to(result.loss.dtype)
        return result.loss * weight, {
            "nll": result.nll * weight,
            "accuracy": torch.minimum(result.correct, tokens) * token_weight,
        }

    def tokens_per_step(self, batches: Any) -> int:
        """Return the mean number of tokens to predict in a step."""
        tokens: int = batches.split.target_total
        return round(tokens / len(batches))

    def step_cost(self) -> tuple[int, float]:
        """Return tokens and FLOPs for full batches of sentences of `NOMINAL_LENGTH`."""
        pairs = self.batch_tokens / (2 * NOMINAL_LENGTH)
        flops = translator_flops(self.model, NOMINAL_LENGTH, NOMINAL_LENGTH).training
        return round(pairs * NOMINAL_LENGTH), pairs * flops
