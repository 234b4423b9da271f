"""Why does KeyNorm read past L: do key norms decide attention, do cosines leave their range?

The source says: without a norm, a key's own size decides how much attention it gets, so that
cos(q, k) is trained badly and leaves its trained range on longer text (kexue.fm/archives/9859).
Measured here: ‖k_j‖ against the attention that key j receives, and the cosines at L and at 8 L, in
models with and without norms; and what the source leaves open, ‖k_j‖ against the position j, and
whether positions that were never trained cost more than cosines out of range.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import polars as pl
from pydantic import Field

from normattn.lab.data import TokenData
from normattn.lab.data.windows import EvaluationSet, non_repeated_set
from normattn.lab.diagnostics import measure_mechanism
from normattn.lab.evaluation.scorer import weights_digest
from normattn.lab.studies.mechanism.page import PAGE
from normattn.lab.sweep.collect import measured_below
from normattn.lab.sweep.language import CausalCell, TextConfig, canonical, opened, text_sweep
from normattn.lab.sweep.layout import CellPaths
from normattn.lab.sweep.measuring import MODEL
from normattn.lab.sweep.reading import cost_of
from normattn.lab.sweep.settings import EvaluationSettings, Preset
from normattn.lab.sweep.stages import MeasureStage, Note, Stage
from normattn.lab.sweep.study import Request, Study, Sweep, cells_of, refuse_choices, seeds_of
from normattn.lab.training import TrainingConfig
from normattn.lab.training.distributed import choose_device
from normattn.lab.training.planning import Cost
from normattn.models.pretrained import load_model
from normattn.settings import Settings

KIND = "mechanism"
VARIANTS = (
    *("Baseline", "KNA", "KNA-NoPE"),
    *("QKLayerNorm", "QKLayerNorm(gain=false)", "QKRMSNorm", "QKRMSNorm(gain=false)"),
)
# Scores are computed twice more, in blocks and in float64, beside the model's own, and texts read
# thrice: 7 to 12 times what reading takes.
WEIGHT = 11

INSTEAD = {"multiples": "mechanism.multiple", "protocols": "the protocols of its question"}


class MechanismSettings(Settings):
    """`reproduce mechanism`: at most `max_windows` texts, read at L and at `multiple` times L."""

    multiple: int = Field(default=8, ge=2)
    max_windows: int = Field(default=64, ge=1)
    max_tokens: int = Field(default=4096, ge=1)


class MechanismPreset(Preset):
    """A preset with what is looked at."""

    mechanism: MechanismSettings = MechanismSettings()


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
        return [LookStage(paths.run, config, self.mechanism, self.evaluation)]


@dataclass(frozen=True)
class LookStage(MeasureStage):
    """Count what the scores of the model in `folder` do."""

    phase = "diagnostics"
    frame = KIND
    config: TrainingConfig
    settings: MechanismSettings
    evaluation: EvaluationSettings

    @property
    def cost(self) -> Cost:
        """Every token that is read, counted as often as looking costs more than reading."""
        length = self.config.model.train_length * self.settings.multiple
        return cost_of(self.config, (length,), WEIGHT * self.settings.max_windows)

    def measured(self, data: TokenData, note: Note) -> pl.DataFrame:
        """What the scores do on held-out texts."""
        model = load_model(self.folder / MODEL, self.config.model).to(
            choose_device(self.config.device)
        )
        texts = evaluation_set(data, self.config.model.train_length, self.settings, self.evaluation)
        return measure_mechanism(
            model,
            texts,
            seed=self.config.seed,
            weights=weights_digest(model),
            tokens_per_batch=self.settings.max_tokens,
            progress=lambda done, total: note(done, total, ""),
        )


def resolve(request: Request) -> Sweep:
    """The study that a request asks for; raises `InputError` as `keynorm.resolve` does."""
    preset = opened(request, KIND, MechanismPreset, INSTEAD)
    refuse_choices(request, KIND)
    looked = preset.mechanism
    config = MechanismConfig.of_text(preset, {"multiples": (1, looked.multiple)})
    own: Mapping[str, Any] = {}
    variants = dict.fromkeys(canonical(request.variants or VARIANTS, config), own)
    cells = cells_of(MechanismCell, config, seeds_of(request, preset), variants)

    def sets(data: TokenData, length: int, settings: EvaluationSettings) -> list[EvaluationSet]:
        return [evaluation_set(data, length, looked, settings)]

    return text_sweep(request, KIND, config, cells, sets)


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


STUDY = Study(
    name=KIND,
    help="Test the source's explanation: key norms against attention, and cosines at L and 8 L."
    "\n\nTrains each score and counts, by hooks on the trained model, how ‖k_j‖ ranks with the "
    "attention that key j receives and with j itself, the range of cos(q, k) at L and at 8 L, and "
    "what positions cost that were never trained. Tables and figures, with intervals over "
    "documents (and seeds).",
    resolve=resolve,
    cells=(MechanismCell,),
    page=PAGE,
    variants="Trained scores, by commas. [default: Baseline, KNA, KNA-NoPE, and QKLayerNorm and "
    "QKRMSNorm with and without gain]",
    examples=(
        ("--preset smoke", "the whole path, small"),
        ("", "the study itself; `--plan` says how long it takes here"),
        ("--variants Baseline,KNA --seeds 3", "two scores, three models each"),
        ("--set mechanism.multiple=16 --plan", "read to 16 L: its cost"),
    ),
    collect=measured_below,
)
