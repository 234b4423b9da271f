"""Score a trained encoder, and look into it layer by layer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from normattn.data import TokenData
from normattn.data.masking import MaskedSet, masked_set
from normattn.diagnostics.depth import layer_gradients, measure_depth
from normattn.evaluation.fingerprints import weights_digest
from normattn.evaluation.masked import MaskedSums, documents_of, score_masked, unigram_loss
from normattn.models.accounting import stack_flops
from normattn.models.masked_lm import MaskedLM
from normattn.models.pretrained import load_as
from normattn.recipes.measuring import MODEL
from normattn.recipes.realformer_settings import LookSettings
from normattn.recipes.stages import Note, Stage
from normattn.recipes.tabulate import origin
from normattn.reports.realformer_records import (
    Depth,
    EncoderRecord,
    Failure,
    Part,
    Setting,
    write_encoder,
)
from normattn.runs import read_status
from normattn.training.distribution import choose_device
from normattn.training.masked import MaskedConfig, masked_parameters
from normattn.training.seeds import derive_seed
from normattn.training.workload import Cost

RECORD, FAILURE = "encoder.json", "failure.json"
# Reading with an eye on attention, twice a loss with its gradients, and scoring.
_PASSES = 9


@dataclass(frozen=True)
class LookStage(Stage):
    """Score the model in `place`; a row of the table is also looked into layer by layer.

    A training that diverged leaves a record that says so; in the table it ends the cell.
    """

    phase = "diagnostics"
    config: MaskedConfig
    place: Path
    settings: LookSettings
    part: Part
    row: str
    size: str

    @property
    def cost(self) -> Cost:
        """Every token that is read, counted as often as looking costs more than reading."""
        length = self.config.model.train_length
        tokens = self.settings.max_windows * length * (_PASSES if self.part == "table" else 1)
        return Cost(scored=tokens, flops=tokens * stack_flops(self.config.model, length).forward)

    def is_done(self) -> bool:
        """Whether there is a record, of the model or of its failure."""
        return any((self.place / name).is_file() for name in (RECORD, FAILURE))

    def run(self, data: TokenData, note: Note) -> str | None:
        """Measure, unless it is on record."""
        status = read_status(self.place)
        assert status is not None
        if status.state == "diverged":
            failed = Failure(
                setting=self._setting(), step=status.step, where=origin(status.message)
            )
            write_encoder(self.place / FAILURE, failed)
            return status.message if self.part == "table" else None
        if not self.is_done():
            write_encoder(self.place / RECORD, self._measured(data, note))
        return None

    def _measured(self, data: TokenData, note: Note) -> EncoderRecord:
        model = load_as(MaskedLM, self.place / MODEL, self.config.model).to(
            choose_device(self.config.device)
        )
        texts = held_out(data, self.config, self.settings)
        sums = score_masked(
            model,
            texts,
            self.settings.max_tokens,
            lambda done, total: note(done, total, "scoring"),
        )
        return EncoderRecord(
            setting=self._setting(),
            weights=weights_digest(model),
            data=texts.fingerprint,
            train_length=texts.length,
            documents=sums.documents,
            windows=sums.windows.tolist(),
            tokens=sums.tokens.tolist(),
            correct=sums.correct[:, -1].tolist(),
            loss=sums.loss.tolist(),
            unigram_loss=unigram_loss(data.train, texts, model.config.vocab_size).tolist(),
            depth=self._depth(model, texts, sums, note) if self.part == "table" else None,
        )

    def _depth(self, model: MaskedLM, texts: MaskedSet, sums: MaskedSums, note: Note) -> Depth:
        most = self.settings.max_tokens
        found = measure_depth(
            model,
            texts,
            documents_of(texts)[1],
            most,
            lambda done, total: note(done, total, "looking"),
        )
        return Depth.model_validate(
            {
                "correct": sums.correct.tolist(),
                "variance": found.variance.tolist(),
                "entropy": found.entropy.tolist(),
                "agreement": found.agreement.tolist(),
                "agreement_mean": found.agreement_mean.tolist(),
                "gradients": layer_gradients(model, texts, most),
                "gradients_start": layer_gradients(self._untrained(), texts, most),
            }
        )

    def _untrained(self) -> MaskedLM:
        """The model as its training began."""
        torch.manual_seed(derive_seed(self.config.seed, "initialisation"))
        return MaskedLM(self.config.model).to(choose_device(self.config.device))

    def _setting(self) -> Setting:
        config, model = self.config, self.config.model
        return Setting(
            part=self.part,
            row=self.row,
            size=self.size,
            seed=config.seed,
            placement=model.placement,
            score=model.score.variant_name,
            shared=model.shared_layers,
            layers=model.layers,
            dim=model.dim,
            parameters=masked_parameters(model),
            steps=config.steps,
            learning_rate=config.optimiser.lr,
            dropout=model.dropout,
            warmup=config.schedule.warmup_steps,
        )


def held_out(data: TokenData, config: MaskedConfig, settings: LookSettings) -> MaskedSet:
    """The texts that every model of a study is scored on, hidden once."""
    masking = config.masking.of(config.model.vocab_size)
    split, length = data.split(settings.split), config.model.train_length
    return masked_set(split, length, masking, settings.max_windows, settings.seed)
