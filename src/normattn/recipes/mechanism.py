"""The source's explanation of why KeyNorm reads on, put to the test (kexue.fm/archives/9859).

It says: without a norm, a key's own size decides how much attention it gets, so that cos(q, k) is
trained badly and leaves its trained range on longer text. Measured here: ‖k_j‖ against the
attention that key j receives, and the cosines at L and at 8 L, in models with and without norms.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from normattn.data import TokenData
from normattn.data.evaluation_sets import EvaluationSet, non_repeated_set
from normattn.diagnostics import measure_mechanism
from normattn.evaluation.fingerprints import weights_digest
from normattn.models.accounting import flops_per_token
from normattn.models.pretrained import load_model
from normattn.recipes.language_studies import (
    CausalCell,
    TextConfig,
    canonical,
    described,
    opened,
    shared_training,
)
from normattn.recipes.layout import CellPaths
from normattn.recipes.measuring import MODEL
from normattn.recipes.settings import EvaluationSettings, MechanismSettings
from normattn.recipes.stages import Note, Stage
from normattn.recipes.studies import (
    Request,
    Sweep,
    place_of,
    refuse_choices,
    seeds_of,
)
from normattn.recipes.tabulate import divergence, say_where
from normattn.reports.mechanism import mechanism_report
from normattn.reports.mechanism_records import read_mechanism, write_mechanism
from normattn.training import TrainingConfig
from normattn.training.distribution import choose_device
from normattn.training.workload import Cost

KIND = "mechanism"
VARIANTS = (
    *("Baseline", "KNA", "KNA-NoPE"),
    *("QKLayerNorm", "QKLayerNorm(gain=false)", "QKRMSNorm", "QKRMSNorm(gain=false)"),
)
RECORD = "mechanism.json"
# Scores are computed a second time, in blocks and in float64, beside the model's own.
WEIGHT = 8


class MechanismConfig(TextConfig):
    """What the study's cells share: also what is looked at."""

    mechanism: MechanismSettings


class MechanismCell(CausalCell):
    """One trained score, looked into."""

    kind: Literal["mechanism"] = "mechanism"
    mechanism: MechanismSettings

    def after(self, paths: CellPaths) -> list[Stage]:
        """Look into the trained model."""
        config = self.training_config
        return [LookStage(config, paths.run, self.mechanism, self.evaluation)]


@dataclass(frozen=True)
class LookStage(Stage):
    """Count what the scores of the model in `place` do."""

    phase = "diagnostics"
    config: TrainingConfig
    place: Path
    settings: MechanismSettings
    evaluation: EvaluationSettings

    @property
    def cost(self) -> Cost:
        """Every token that is read, counted as often as looking costs more than reading."""
        model = self.config.model
        length = model.train_length * self.settings.multiple
        tokens = WEIGHT * self.settings.max_windows * length
        return Cost(scored=tokens, flops=tokens * flops_per_token(model, length).forward)

    def is_done(self) -> bool:
        """Whether the record is there."""
        return (self.place / RECORD).is_file()

    def run(self, data: TokenData, note: Note) -> str | None:
        """Measure, unless it is on record."""
        if self.is_done():
            return None
        model = load_model(self.place / MODEL, self.config.model).to(
            choose_device(self.config.device)
        )
        texts = evaluation_set(data, self.config.model.train_length, self.settings, self.evaluation)
        record = measure_mechanism(
            model,
            texts,
            seed=self.config.seed,
            weights=weights_digest(model),
            tokens_per_batch=self.settings.max_tokens,
            progress=lambda done, total: note(done, total, ""),
        )
        write_mechanism(self.place / RECORD, record)
        return None


def resolve(request: Request) -> Sweep:
    """The study that a request asks for; raises `InputError` as `keynorm.resolve` does."""
    preset = opened(request, KIND, group=KIND)
    refuse_choices(request, KIND)
    config = MechanismConfig(
        preset=preset.name,
        training=shared_training(preset),
        evaluation=preset.evaluation.model_copy(
            update={"multiples": (1, preset.mechanism.multiple)}
        ),
        mechanism=preset.mechanism,
    )
    cells = tuple(
        MechanismCell(
            variant=variant,
            seed=seed,
            training=config.training,
            evaluation=config.evaluation,
            mechanism=config.mechanism,
        )
        for seed in seeds_of(request, preset)
        for variant in canonical(request.variants or VARIANTS, config)
    )
    return Sweep(
        study=KIND,
        config=config,
        cells=cells,
        skipped=(),
        out=place_of(request, KIND, preset),
        report=report,
        describe=described(
            lambda data: [
                evaluation_set(data, config.train_length, config.mechanism, config.evaluation)
            ]
        ),
        facts=config.facts,
    )


def evaluation_set(
    data: TokenData,
    train_length: int,
    settings: MechanismSettings,
    evaluation: EvaluationSettings,
) -> EvaluationSet:
    """Held-out natural text of `multiple` training lengths."""
    split = data.split(evaluation.split)
    windows, seed = settings.max_windows, evaluation.seed
    return non_repeated_set(split, train_length, settings.multiple, max_windows=windows, seed=seed)


def report(out: Path) -> None:
    """Write the table and the figures of what was measured in `out`."""
    runs = sorted(path.parent for path in (out / "cells").glob("*/seed*/config.json"))
    records = [read_mechanism(run / RECORD) for run in runs if (run / RECORD).is_file()]
    diverged = [found for run in runs if (found := divergence(run)) is not None]
    say_where(out, len(mechanism_report(records, diverged, out)))
