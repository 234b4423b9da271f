"""Why does KeyNorm handle text past L: do key norms decide attention, do cosines leave their range?

The source says: without a norm, a key's own size decides how much attention it gets, so that
cos(q, k) is trained badly and leaves its trained range on longer text (kexue.fm/archives/9859).
Measured here: ‖k_j‖ against the attention that key j receives, and the cosines at L and at 8 L, in
models with and without norms. Also what the source leaves open: ‖k_j‖ against the position j, and
whether positions that were never trained cost more than cosines out of range.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

import polars as pl
from pydantic import Field

from normattn.lab.data.tokens import TokenData
from normattn.lab.data.windows import EvaluationSet, natural_set
from normattn.lab.diagnostics.mechanism import measure_mechanism
from normattn.lab.evaluation.scorer import weights_digest
from normattn.lab.studies.base import Study
from normattn.lab.studies.language import TextSetting, reading_cost
from normattn.lab.studies.mechanism_report import KIND, TABLES, claims, figures
from normattn.lab.studies.methods import canonical
from normattn.lab.studies.preset import EvaluationSettings, Preset, opened
from normattn.lab.sweep.run import Note, Request, Run, Sweep
from normattn.lab.training import TrainingConfig
from normattn.lab.training.planning import Cost
from normattn.lab.training.tasks.text import CausalWorkload
from normattn.settings import Settings

VARIANTS = (
    *("Baseline", "KNA", "KNA-NoPE"),
    *("QKLayerNorm", "QKLayerNorm(gain=false)", "QKRMSNorm", "QKRMSNorm(gain=false)"),
)
# Scores are computed twice more, in blocks and in float64, beside the model's own, and texts read
# thrice: 7 to 12 times what reading takes.
WEIGHT = 11


class MechanismSettings(Settings):
    """`reproduce mechanism`: at most `max_windows` texts, read at L and at `multiple` times L."""

    multiple: int = Field(default=8, ge=2)
    max_windows: int = Field(default=64, ge=1)
    max_tokens: int = Field(default=4096, ge=1)


class MechanismPreset(Preset):
    """A shared preset as this study reads it."""

    mechanism: MechanismSettings = MechanismSettings()


class MechanismRun(Run):
    """One trained score, and what its layers do on held-out texts."""

    workload: ClassVar[CausalWorkload] = CausalWorkload()
    record, phase = KIND, "diagnostics"
    kind: Literal["mechanism"] = "mechanism"
    evaluation: EvaluationSettings
    mechanism: MechanismSettings

    def cost(self, config: TrainingConfig) -> Cost:
        """Every text is read several times."""
        rows = WEIGHT * self.mechanism.max_windows
        return reading_cost(config, (self.mechanism.multiple,), rows)

    def measure(
        self, folder: Path, config: TrainingConfig, data: TokenData, note: Note
    ) -> pl.DataFrame:
        """Count what the scores do on held-out texts."""
        model = self.model_in(folder, config)
        return measure_mechanism(
            model,
            self.texts(data, config.model.train_length),
            seed=config.seed,
            weights=weights_digest(model),
            tokens_per_batch=self.mechanism.max_tokens,
            progress=lambda done, total: note(done, total, ""),
        )

    def texts(self, data: TokenData, length: int) -> EvaluationSet:
        """Held-out natural text of `multiple` training lengths."""
        split, read = data.split(self.evaluation.split), self.mechanism
        return natural_set(
            "non_repeated",
            split,
            length,
            read.multiple,
            max_windows=read.max_windows,
            seed=self.evaluation.seed,
        )


def resolve(request: Request) -> Sweep:
    """The study that a request asks for; raises `InputError` as `keynorm.resolve` does."""
    instead = {
        "multiples": "mechanism.multiple",
        "protocols": "the protocols of its question",
        "max_windows": "mechanism.max_windows",
        "max_tokens": "mechanism.max_tokens",
        "precision": "fp32",
    }
    preset = opened(request, KIND, MechanismPreset, instead)
    settings = preset.mechanism
    setting = TextSetting.of(preset, {"multiples": (1, settings.multiple)})
    variants = canonical(request.variants or VARIANTS, setting)
    runs = [
        MechanismRun(
            variant=variant,
            training=setting.trains(variant),
            evaluation=setting.evaluation,
            mechanism=settings,
        )
        for variant in variants
    ]
    return setting.sweep(
        request,
        KIND,
        runs,
        sets=lambda data, length, _: [runs[0].texts(data, length)],
        mechanism=settings,
    )


STUDY = Study(
    "mechanism",
    "Does a key's norm decide how much attention it receives, and do cosines leave their "
    "trained range on longer text?",
    title="Key norms, attention and cosines",
    help="Test the KeyNorm post's explanation: key norms, attention, and cosines at L and 8 L.\n\n"
    "Trains each score and measures three things: the rank correlation of ‖k_j‖ with the attention "
    "that key j receives and with j, the range of cos(q, k) at L and 8 L, and what positions cost "
    "that never occurred in training.",
    sources=("kexue.fm/archives/9859",),
    resolve=resolve,
    runs=(MechanismRun,),
    tables=TABLES,
    claims=claims,
    figures=figures,
    variants_help="Trained scores, separated by commas. [default: Baseline, KNA, KNA-NoPE, and "
    "QKLayerNorm and QKRMSNorm with and without gain]",
    examples=(("--set mechanism.multiple=16 --plan", "the cost of evaluating at 16 L"),),
)
