"""The stage that scores a trained encoder on held-out text and measures it layer by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import polars as pl
import torch
from numpy.typing import ArrayLike

from normattn.lab.data import TokenData
from normattn.lab.data.windows import MaskedSet, masked_set
from normattn.lab.diagnostics.depth import layer_gradients, measure_depth
from normattn.lab.evaluation.masked import documents_of, score_masked, unigram_loss
from normattn.lab.evaluation.scorer import weights_digest
from normattn.lab.stats import Identity, fact, identified, joined, sums
from normattn.lab.stats.measurements import Factor
from normattn.lab.studies.realformer.settings import LookSettings
from normattn.lab.sweep.measuring import MODEL
from normattn.lab.sweep.stages import MeasureStage, Note, divergence, with_weights
from normattn.lab.sweep.study import Cell, diverged
from normattn.lab.training.distributed import choose_device
from normattn.lab.training.init_from import new_masked_model
from normattn.lab.training.planning import Cost
from normattn.lab.training.task import derive_seed
from normattn.lab.training.tasks.text import MaskedConfig
from normattn.models.flops import planned_parameters, stack_flops
from normattn.models.masked_lm import MaskedLM
from normattn.models.pretrained import load_as

# Reading while attention is observed, twice a loss with its gradients, and scoring.
_PASSES = 9


@dataclass(frozen=True)
class ScoreStage(MeasureStage):
    """Score the model in `place`; a row of the table (no `factors`) also layer by layer.

    `factors` are the settings of a run of the robustness grid; one that diverged is measured as
    such.
    """

    phase = "diagnostics"
    frame = "scores"
    cell: Cell
    config: MaskedConfig
    settings: LookSettings
    factors: Mapping[str, Factor] = field(default_factory=dict)

    @property
    def cost(self) -> Cost:
        """Every token that is read, counted as often as a pass costs more than reading."""
        length = self.config.model.train_length
        tokens = self.settings.max_windows * length * (1 if self.factors else _PASSES)
        return Cost(scored=tokens, flops=tokens * stack_flops(self.config.model, length).forward)

    def measured(self, data: TokenData, note: Note) -> pl.DataFrame:
        """The model, or its divergence."""
        lost = divergence(self.folder)
        if lost is not None:
            return diverged(self.cell, lost.step, lost.where, **self.factors)
        model = load_as(MaskedLM, self.folder / MODEL, self.config.model).to(
            choose_device(self.config.device)
        )
        texts = held_out(data, self.config, self.settings)
        scores = score_masked(
            model,
            texts,
            self.settings.max_tokens,
            lambda done, total: note(done, total, "scoring"),
        )
        unigram = unigram_loss(data.train, texts, model.config.vocab_size)
        scored = [
            sums("accuracy", scores.documents, scores.correct[:, -1], scores.tokens),
            sums("loss", scores.documents, scores.loss, scores.tokens),
            sums("unigram_loss", scores.documents, unigram, scores.tokens),
        ]
        who = replace(
            self.cell.identity("grid" if self.factors else "masked", **self.factors),
            length=texts.length,
            train_length=texts.length,
            split=self.settings.split,
            data=texts.fingerprint,
            weights=weights_digest(model),
        )
        if self.factors:
            return identified(who, scored)
        exits = by_layer("exit_accuracy", scores.documents, scores.correct, scores.tokens)
        return joined(
            [
                identified(who, scored),
                identified(replace(who, protocol="depth"), exits + self._depth(model, texts, note)),
                self._facts(who),
            ]
        )

    def _depth(self, model: MaskedLM, texts: MaskedSet, note: Note) -> list[pl.DataFrame]:
        """What happens in each layer: documents are the units, of gradients batches of texts."""
        most = self.settings.max_tokens
        documents, indices = documents_of(texts)
        depths = measure_depth(
            model, texts, indices, most, lambda done, total: note(done, total, "layer by layer")
        )
        windows = np.bincount(indices, minlength=len(documents))
        parts = by_layer("variance", documents, depths.variance, windows, first=0)
        parts += by_layer("entropy", documents, depths.entropy, windows)
        parts += by_layer("agreement", documents, depths.agreement, windows, first=2)
        parts += by_layer("agreement_mean", documents, depths.agreement_mean, windows, first=2)
        for name, of in (("gradients", model), ("gradients_start", self._untrained())):
            norms = np.array(layer_gradients(of, texts, most))
            # Layers that share their weights have no gradient of their own.
            if norms.size:
                batches = [f"batch {number:04}" for number in range(len(norms))]
                parts += by_layer(name, batches, norms, np.ones(len(norms)))
        return parts

    def _untrained(self) -> MaskedLM:
        """The model as its training began."""
        torch.manual_seed(derive_seed(self.config.seed, "initialisation"))
        begun = with_weights(self.config)
        return new_masked_model(begun.model, begun.continued).to(choose_device(begun.device))

    def _facts(self, who: Identity) -> pl.DataFrame:
        """The numbers of the training that a reader of the table asks for."""
        config, model = self.config, self.config.model
        facts = {
            "layers": model.layers,
            "dim": model.dim,
            "parameters": planned_parameters(MaskedLM, model),
            "planned_steps": config.steps,
            "learning_rate": config.optimiser.lr,
            "dropout": model.dropout,
            "warmup": config.schedule.warmup_steps,
        }
        parts = [fact(name, float(value)) for name, value in facts.items()]
        return identified(replace(who, protocol="training"), parts)


def by_layer(
    statistic: str, units: Sequence[str], above: ArrayLike, of: ArrayLike, first: int = 1
) -> list[pl.DataFrame]:
    """Sums (units, layers) over counts (units,) as rows of the layers `first`, `first` + 1, …"""
    columns = np.asarray(above, dtype=np.float64).T
    return [sums(statistic, units, column, of, layer=n) for n, column in enumerate(columns, first)]


def held_out(data: TokenData, config: MaskedConfig, settings: LookSettings) -> MaskedSet:
    """The texts that every model of a study is scored on, hidden once."""
    masking = config.masking.of(config.model.vocab_size)
    split, length = data.split(settings.split), config.model.train_length
    return masked_set(split, length, masking, settings.max_windows, settings.seed)
