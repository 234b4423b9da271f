"""Training an encoder–decoder to translate, from one configuration to one saved model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Int64
from pydantic import Field, model_validator
from torch import Tensor

from normattn.errors import InputError
from normattn.lab.data.pairs import (
    EOS_ID,
    PAD_ID,
    PairBatches,
    PairData,
    PairsConfig,
    look_for_pairs,
    prepare_pairs,
)
from normattn.lab.training.loop_config import LoopConfig
from normattn.lab.training.planning import Cost
from normattn.lab.training.reports import TrainingResult
from normattn.lab.training.seeds import derive_seed
from normattn.lab.training.task import Task
from normattn.lab.training.workload import Workload, train_workload
from normattn.models.config import TranslatorConfig
from normattn.models.flops import parameter_count, translator_flops
from normattn.models.translator import Translator
from normattn.score import ScoreSpec

NOMINAL_LENGTH = 16
"""Tokens of a sentence by which a training's cost is told before its data is read."""


class TranslationConfig(LoopConfig):
    """A translation model, its sentence pairs, and how it is trained.

    model: as `TranslatorConfig`; its vocabularies are those of `data` and may be left out, and so
    may its train_length, which is then `data.max_length`. batch_tokens: padded source and target
    tokens of an optimiser step, over all processes and micro-batches (of which there may be 1, 2, 4
    or 8 together). label_smoothing: as in arXiv 1512.00567, in training only.
    """

    model: TranslatorConfig
    data: PairsConfig = PairsConfig()
    batch_tokens: int = Field(default=4096, ge=1, le=10**8)
    label_smoothing: float = Field(default=0.1, ge=0.0, lt=1.0)

    @property
    def scores(self) -> tuple[ScoreSpec, ...]:
        """The encoder's, the decoder's and those of the attention across."""
        model = self.model
        scores = (model.score, model.decoder_score, model.cross_score)
        return tuple(score for score in scores if score is not None)

    @model_validator(mode="before")
    @classmethod
    def _fill_vocabularies(cls, values: Any) -> Any:
        """What the data decides; saying it twice is allowed, not needed."""
        if not isinstance(values, Mapping) or not isinstance(values.get("model"), Mapping):
            return values
        given = values.get("data", {})
        data = given if isinstance(given, PairsConfig) else PairsConfig.model_validate(given)
        decided = _decided_by(data) | {"train_length": data.max_length}
        return {**values, "model": {**decided, **values["model"]}}

    @model_validator(mode="after")
    def _check_vocabularies(self) -> TranslationConfig:
        for name, wanted in _decided_by(self.data).items():
            given = getattr(self.model, name)
            if given != wanted:
                raise ValueError(
                    f"model.{name} is {given} but the data makes it {wanted}; leave it out"
                )
        return self


def _decided_by(data: PairsConfig) -> dict[str, Any]:
    """The settings of the model that follow from its data's."""
    return {
        "source_vocab": data.vocab_size,
        "target_vocab": data.target_vocab_size or data.vocab_size,
        "shared_vocabulary": data.target_vocab_size is None,
    }


class TranslationBatch(NamedTuple):
    """`data.pairs.PairBatch` as tensors."""

    source: Int64[Tensor, "rows S"]
    target: Int64[Tensor, "rows T_1"]
    targets: Int64[Tensor, ""]


class TranslationTask:
    """Predicting each token of a translation from those before it and from the source."""

    def __init__(
        self, config: TranslationConfig, data: PairData, device: torch.device, shares: int
    ) -> None:
        self.config = config
        self.model = Translator(config.model).to(device)
        self._batches = _batches(config, data)
        self._shares = shares
        self._targets = data.train.target_total

    @property
    def tokens_per_step(self) -> int:
        """Tokens to predict in a step, on average: batches differ a little."""
        return round(self._targets / len(self._batches))

    def batch(self, step: int, share: int, shares: int) -> TranslationBatch:
        """Part `share` of `shares` of the sentence pairs of `step`."""
        rows = self._batches.batch(step, share, shares)
        return TranslationBatch(*(torch.as_tensor(array) for array in rows))

    def loss(self, batch: TranslationBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Smoothed loss, plain loss (nats) and accuracy, each a mean over the whole batch's tokens.

        A share is weighted by its tokens, so that the mean over shares is that of the batch.
        """
        real, target = (batch.target[:, 1:] != PAD_ID).sum(), batch.target
        if not real:  # A share that only fills up: some loss that counts nothing.
            target = torch.full_like(target, EOS_ID)
        result = self.model.loss(batch.source, target, self.config.label_smoothing)
        parts = self._shares / batch.targets.double()
        weight = (real * parts).to(result.loss.dtype)
        return result.loss * weight, {
            "nll": result.nll * weight,
            "accuracy": torch.minimum(result.correct, real) * parts,
        }


class TranslationWorkload(Workload[TranslationConfig, PairData]):
    """A translation model on sentence pairs; its tokenisers are left beside it."""

    kind = "translation"
    config_class = TranslationConfig

    def prepare(self, config: TranslationConfig) -> PairData:
        """The sentence pairs as tokens."""
        return prepare_pairs(config.data)

    def look(self, config: TranslationConfig) -> tuple[str, ...]:
        """Whether there are such files of sentence pairs."""
        look_for_pairs(config.data)
        return ()

    def check(self, config: TranslationConfig, data: PairData, shares: int) -> None:
        """The longest pairs must fit into a batch, and the batch must divide."""
        _batches(config, data).batch(1, 0, shares)

    def task(
        self, config: TranslationConfig, data: PairData, device: torch.device, shares: int
    ) -> TranslationTask:
        """Translation on this device."""
        return TranslationTask(config, data, device, shares)

    def cost(self, config: TranslationConfig) -> Cost:
        """As of full batches of sentences of `NOMINAL_LENGTH`: the data is not looked at."""
        pairs = config.steps * config.batch_tokens / (2 * NOMINAL_LENGTH)
        flops = translator_flops(config.model, NOMINAL_LENGTH, NOMINAL_LENGTH).training
        return Cost(
            trained=round(pairs * NOMINAL_LENGTH),
            flops=pairs * flops,
            parameters=parameter_count(config.model),
            kept=config.model.dim * config.model.layers,
        )

    def export(self, task: Task, data: PairData, out: Path) -> None:
        """The tokenisers and the model."""
        data.source_tokeniser.save(out / "source.tokeniser.json")
        data.target_tokeniser.save(out / "target.tokeniser.json")
        super().export(task, data, out)


def train_translation(config: TranslationConfig, out: Path | str, **choices: Any) -> TrainingResult:
    """Train a translation model in the run directory `out`; `choices` as `train_workload`."""
    return train_workload(TranslationWorkload(), config, out, **choices)


def epochs(config: TranslationConfig, data: PairData) -> float:
    """How often a training sees every pair."""
    return config.steps / len(_batches(config, data))


def _batches(config: TranslationConfig, data: PairData) -> PairBatches:
    if not len(data.train):
        raise InputError(f"corpus {config.data.corpus!r} leaves no pair to train on")
    return PairBatches(data.train, config.batch_tokens, derive_seed(config.seed, "batches"))
