"""Why does KeyNorm read past L: do key norms decide attention, do cosines leave their range?

The source says: without a norm, a key's own size decides how much attention it gets, so that
cos(q, k) is trained badly and leaves its trained range on longer text (kexue.fm/archives/9859).
Measured here: ‖k_j‖ against the attention that key j receives, and the cosines at L and at 8 L, in
models with and without norms; and what the source leaves open, ‖k_j‖ against the position j, and
whether positions that were never trained cost more than cosines out of range.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import polars as pl
from pydantic import Field

from normattn.lab.data import TokenData
from normattn.lab.data.windows import EvaluationSet, non_repeated_set
from normattn.lab.diagnostics import measure_mechanism
from normattn.lab.diagnostics.keys import FIRST, TAIL
from normattn.lab.evaluation.scorer import weights_digest
from normattn.lab.report.tables import Table
from normattn.lab.studies.base import Study
from normattn.lab.studies.language import TextSetting, reading_cost
from normattn.lab.studies.mechanism_report import (
    KIND,
    claims,
    clamped_columns,
    columns,
    figures,
    position_columns,
    range_columns,
    rows,
)
from normattn.lab.studies.methods import canonical
from normattn.lab.studies.preset import EvaluationSettings, opened, own_group
from normattn.lab.sweep.paths import RunPaths
from normattn.lab.sweep.run import Note, Request, Run, Stage, Sweep, measuring_stage, training_stage
from normattn.lab.training.distributed import choose_device
from normattn.lab.training.tasks.text import CausalWorkload
from normattn.lab.training.tasks.workload import MODEL
from normattn.models.pretrained import load_model
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


class MechanismRun(Run):
    """One trained score, looked into."""

    workload: ClassVar[CausalWorkload] = CausalWorkload()
    kind: Literal["mechanism"] = "mechanism"
    evaluation: EvaluationSettings
    mechanism: MechanismSettings

    def stages(self, paths: RunPaths) -> list[Stage]:
        """Train, then count what the scores do on held-out texts."""
        config, settings = self.training_config, self.mechanism
        rows = WEIGHT * settings.max_windows

        def look(data: TokenData, note: Note) -> pl.DataFrame:
            model = load_model(paths.run / MODEL, config.model).to(choose_device(config.device))
            return measure_mechanism(
                model,
                self.texts(data, config.model.train_length),
                seed=config.seed,
                weights=weights_digest(model),
                tokens_per_batch=settings.max_tokens,
                progress=lambda done, total: note(done, total, ""),
            )

        return [
            training_stage(self.workload, config, paths.run),
            measuring_stage(
                paths.run,
                KIND,
                look,
                lambda: reading_cost(config, (settings.multiple,), rows),
                phase="diagnostics",
            ),
        ]

    def texts(self, data: TokenData, length: int) -> EvaluationSet:
        """Held-out natural text of `multiple` training lengths."""
        split, look = data.split(self.evaluation.split), self.mechanism
        return non_repeated_set(
            split, length, look.multiple, max_windows=look.max_windows, seed=self.evaluation.seed
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
    preset = opened(request, KIND, "mechanism", instead)
    request.refuse_choices(KIND)
    looked = own_group(request, "mechanism", MechanismSettings)
    setting = TextSetting.of(preset, {"multiples": (1, looked.multiple)})
    variants = canonical(request.variants or VARIANTS, setting)
    runs = [
        MechanismRun(
            variant=variant,
            seed=seed,
            training=setting.trains(variant),
            evaluation=setting.evaluation,
            mechanism=looked,
        )
        for seed in request.seeds_or(preset.seeds)
        for variant in variants
    ]
    return setting.sweep(
        request,
        KIND,
        runs,
        sets=lambda data, length, _: [runs[0].texts(data, length)],
        mechanism=looked,
    )


STUDY = Study(
    "mechanism",
    "Does a key's norm decide how much attention it receives, and do cosines leave their "
    "trained range on longer text?",
    title="Key norms, attention and cosines",
    help="Test the source's explanation: key norms against attention, and cosines at L and 8 L."
    "\n\nTrains each score and counts, by hooks on the trained model, how ‖k_j‖ ranks with the "
    "attention that key j receives and with j itself, the range of cos(q, k) at L and at 8 L, and "
    "what positions cost that were never trained. Tables and figures, with intervals over "
    "documents (and seeds).",
    sources=("kexue.fm/archives/9859",),
    resolve=resolve,
    runs=(MechanismRun,),
    tables=(
        Table(
            "table",
            "",
            rows,
            columns,
            notes=(
                "rank correlation: Spearman's, between ‖k_j‖ as the score sees it and the "
                "attention that key j receives from the next L/2 queries relative to uniform "
                "attention, within a text; mean over layers, heads and texts. heads + / −: those "
                "whose own interval lies above or below 0.",
                "before the norm: the same with the key as it enters the score; a norm cannot hand "
                "it on.",
                "spread: standard deviation of ‖k_j‖ over its mean, within a text.",
                "cosine: cos(q_i, k_j) as the score has them, quantiles, mean over heads; least "
                "and largest of all heads.",
                f"outside: share of the pairs at the longer length whose cosine lies outside the "
                f"range of its head at L ({TAIL:.1%} left out at either end).",
            ),
        ),
        Table(
            "positions",
            "Does a key's norm carry its position?",
            lambda view: rows(view, "raw_position"),
            position_columns,
            notes=(
                "rank correlation: Spearman's, between ‖k_j‖ and j within a text of the training "
                f"length, the first {FIRST} keys left out; mean over layers, heads of keys and "
                "texts. Above 0 norms grow with the position; heads of opposite signs cancel.",
                "heads + / − / all: heads of all trained models, those whose own interval over "
                "documents lies above or below 0; by chance one of forty is above and one below.",
                "size: the same in every second document, with the sign turned by that which the "
                "head has in the other documents, so that heads of opposite signs add up. Chance "
                "gives 0, also where neighbouring keys have similar norms; it would raise a mean "
                "of |ρ|.",
                f"first key, next {FIRST - 1}: their norm over the median norm of all after them.",
                "as the score sees it, raw: after and before the key's normalisation.",
            ),
        ),
        Table(
            "distances",
            "Where do cosines leave their trained range?",
            lambda view: rows(view, "pairs"),
            range_columns,
            notes=(
                f"outside: the cosine lies outside the range that its head has at L ({TAIL:.1%} "
                "left out at either end, so that up to twice as much is outside at L itself). "
                "Nearer than L: at a distance i − j < L, which was trained; further: at i − j ≥ L, "
                "which was not. Of the pairs of each kind, read at the longer length; difference: "
                "further − nearer.",
                "attention: of all attention of the queries at i ≥ L, mean over heads; what is "
                "left of 100 is inside the range at trained distances, or a sink's.",
            ),
        ),
        Table(
            "clamped",
            "What do unseen positions cost?",
            lambda view: rows(view, "last_accuracy"),
            lambda view: [*clamped_columns(view)],
            notes=(
                "Accuracy in % and loss in nats of the last L tokens of each text. Alone: with "
                "nothing before them; as is: behind the whole text; clamped: the same with every "
                "relative position from L − 1 on read as L − 1 (ReRoPE with w = L − 1), switched "
                "on in the trained model, so that no pair is at a position that was not trained.",
                "What clamping gives back is what unseen positions took; what then still lacks to "
                "the tokens alone, something else took: the number of keys, or cosines out of "
                "range.",
            ),
        ),
    ),
    claims=claims,
    figures=figures,
    variants_help="Trained scores, by commas. [default: Baseline, KNA, KNA-NoPE, and QKLayerNorm "
    "and QKRMSNorm with and without gain]",
    examples=(
        ("--preset smoke", "the whole path, small"),
        ("", "the study itself; `--plan` says how long it takes here"),
        ("--variants Baseline,KNA --seeds 3", "two scores, three models each"),
        ("--set mechanism.multiple=16 --plan", "read to 16 L: its cost"),
    ),
)
