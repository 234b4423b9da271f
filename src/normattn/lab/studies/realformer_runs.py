"""What the RealFormer study trains and measures: encoders, and a grid of their settings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import polars as pl
import torch
from numpy.typing import ArrayLike
from pydantic import AfterValidator, Field

from normattn.errors import InputError
from normattn.lab.data import TokenData
from normattn.lab.data.windows import MaskedSet, masked_set
from normattn.lab.diagnostics.depth import layer_gradients, measure_depth
from normattn.lab.evaluation.masked import documents_of, score_masked, unigram_loss
from normattn.lab.stats import Identity, identified, joined, sums
from normattn.lab.stats.measurements import Factor
from normattn.lab.studies.preset import StudyPreset, shared_training
from normattn.lab.studies.trained import identity_of, trained, training_facts
from normattn.lab.sweep.config import merged
from normattn.lab.sweep.paths import RunPaths
from normattn.lab.sweep.run import (
    UNKNOWN,
    Note,
    Run,
    Stage,
    divergence,
    measuring_stage,
    training_stage,
    with_weights,
)
from normattn.lab.training.distributed import choose_device
from normattn.lab.training.init_from import Continuation, new_model
from normattn.lab.training.planning import Cost
from normattn.lab.training.task import derive_seed
from normattn.lab.training.tasks.text import MaskedConfig, MaskedWorkload
from normattn.lab.training.tasks.workload import MODEL
from normattn.models.config import NORMLESS, Placement
from normattn.models.flops import planned_parameters, stack_flops
from normattn.models.masked_lm import MaskedLM
from normattn.settings import Settings

VARIED = tuple(f"model.{name}" for name in ("score", "placement", "shared_layers", "exits"))
"""The settings that the rows of the table differ in."""
PASSES = 9
"""Reading while attention is observed, twice a loss with its gradients, and scoring."""

# Rows and presets


class Encoder(Settings):
    """A row of the table: where norms stand, how scores are summed, and what else differs.

    `half`: half the steps, with a schedule that ends there. `start` is the row whose trained
    weights initialise this one.
    """

    placement: Placement
    score: str = "Baseline"
    shared: bool = False
    half: bool = False
    start: str | None = None


def _realformer(placement: Placement = "PostLN", **more: Any) -> Encoder:
    return Encoder(placement=placement, score="Baseline-RealFormer", **more)


ROWS: dict[str, Encoder] = {
    "PreLN": Encoder(placement="PreLN"),
    "PostLN": Encoder(placement="PostLN"),
    "RealFormer": _realformer(),
    "RealFormer-half": _realformer(half=True),
    "RealFormer-mean": Encoder(placement="PostLN", score="Baseline-RealFormer(running_mean=true)"),
    "RealFormer-PreLN": _realformer("PreLN"),
    "ResidualQK": Encoder(placement="PostLN", score="Baseline-ResidualQK"),
    "ResidualQKV": Encoder(placement="PostLN", score="Baseline-ResidualQKV"),
    "ValueResidual": Encoder(placement="PostLN", score="Baseline-ValueResidual"),
    "AttnRes": Encoder(placement="AttnRes"),
    "DeepNorm": Encoder(placement="DeepNorm"),
    "ReZero": Encoder(placement="ReZero"),
    "ReZeroNoNorm": Encoder(placement="ReZeroNoNorm"),
    "FixedScale": Encoder(placement="FixedScale"),
    "PostLN-shared": Encoder(placement="PostLN", shared=True),
    "RealFormer-shared": _realformer(shared=True),
    "PostLN-continued": Encoder(placement="PostLN", half=True, start="PostLN"),
    "RealFormer-from-PostLN": _realformer(half=True, start="PostLN"),
}
"""Every row in the order of the table."""


def known_rows(names: Iterable[str], subject: str = "rows") -> tuple[str, ...]:
    """The rows in the order of the table; `InputError` for one that is none, or comes twice."""
    named = list(names)
    for name in named:
        if name not in ROWS:
            raise InputError(f"{subject}: there is no row {name!r}; there are {', '.join(ROWS)}")
    if len(set(named)) < len(named):
        raise InputError(f"{subject} names a row twice: {', '.join(named)}")
    return tuple(name for name in ROWS if name in named)


def _trained_afresh(rows: tuple[str, ...]) -> tuple[str, ...]:
    for row in rows:
        if (start := ROWS[row].start) is not None:
            raise InputError(f"{row} starts from a trained {start}, which the grid does not")
    return rows


def _by_known_row(rates: dict[str, float]) -> dict[str, float]:
    known_rows(rates, "rates")
    return rates


Rows = Annotated[tuple[str, ...], AfterValidator(known_rows)]
Rates = Annotated[dict[str, Annotated[float, Field(gt=0)]], AfterValidator(_by_known_row)]


class SizeSettings(Settings):
    """One size of model: what differs in `training`, its rows, and its seeds (None: the preset's).

    `rows` None stands for every row, `[]` for none of this size. `rates`: the learning rate of a
    row, where it is another than that of `training`.
    """

    training: dict[str, Any]
    rows: Rows | None = None
    # Left out of a dump where it is empty: runs that were made before it stay the same.
    rates: Rates = Field(default_factory=dict, exclude_if=lambda rates: not rates)
    seeds: int | None = Field(default=None, ge=1)


class GridSettings(Settings):
    """The robustness grid: each of `rows`, of the size `size`, at every rate and dropout.

    `warmup_steps` are those of the runs with warm-up; every setting is trained without one too.
    No row: no grid.
    """

    size: str
    rows: Annotated[Rows, AfterValidator(_trained_afresh)] = ("PreLN", "PostLN", "RealFormer")
    rates: tuple[Annotated[float, Field(gt=0)], ...] = Field(min_length=1)
    dropouts: tuple[Annotated[float, Field(ge=0, lt=1)], ...] = Field(min_length=1)
    steps: int = Field(ge=1)
    warmup_steps: int = Field(ge=1)
    seeds: int = Field(default=1, ge=1)


class ScoringSettings(Settings):
    """What a trained encoder is scored and measured on: windows of held-out text.

    `max_tokens` bounds what is read at once (memory; gradients are those of batches of so many).
    """

    max_windows: int = Field(default=256, ge=2)
    max_tokens: int = Field(default=2048, ge=1)
    seed: int = Field(default=0, ge=0)
    split: Literal["test", "validation"] = "test"


class RealFormerPreset(StudyPreset):
    """One whole setting of the study; `training` holds fields of `MaskedConfig`.

    The placement, the score, the shared layers and the seed are what the table varies.
    """

    sizes: dict[str, SizeSettings] = Field(min_length=1)
    grid: GridSettings
    evaluation: ScoringSettings = ScoringSettings()

    def whole_training(self, size: str) -> dict[str, Any]:
        """The training settings of a size with every default, less what the table varies."""
        fields = merged(self.training, self.sizes[size].training)
        return shared_training(MaskedConfig, fields, VARIED, f"preset {self.name}, size {size}")


def row_training(
    training: Mapping[str, Any], name: str, rates: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """The training settings of a row of the table, all but its seed and its start.

    `rates` are learning rates of rows; one with a start has that of its start, unless it has its
    own. Where there are no norms, those of the preset are left out. Raises `InputError` for a half
    of the steps that is shorter than the warm-up.
    """
    row = ROWS[name]
    changes: dict[str, Any] = {
        "model.placement": row.placement,
        "model.score": row.score,
        "model.shared_layers": row.shared,
        "model.exits": training["model"]["layers"] > 1,
    }
    own = [rate for rate in map((rates or {}).get, (name, row.start or name)) if rate is not None]
    if own:
        changes["optimiser.lr"] = own[0]
    if row.half:
        changes["steps"] = max(1, training["steps"] // 2)
        if training["schedule"]["warmup_steps"] > changes["steps"]:
            raise InputError(f"half of {training['steps']} steps is less than their warm-up")
    whole = merged(training, changes)
    if row.placement in NORMLESS:
        for field in ("norm", "norm_gain", "norm_eps"):
            del whole["model"][field]
    return whole


# Runs


class EncoderRun(Run):
    """One row of the table at one size, scored on hidden tokens and measured layer by layer.

    `start` are the settings of the row whose trained weights initialise it.
    """

    workload: ClassVar[MaskedWorkload] = MaskedWorkload()
    kind: Literal["realformer"] = "realformer"
    size: str
    evaluation: ScoringSettings
    start: dict[str, Any] | None = None

    @property
    def training_config(self) -> MaskedConfig:
        """The settings of this run's first training."""
        return self._whole(self.start or self.training)

    @property
    def own_config(self) -> MaskedConfig:
        """The settings of the row itself, without those of its start."""
        return self._whole(self.training)

    def _whole(self, training: Mapping[str, Any]) -> MaskedConfig:
        return MaskedConfig.parse({**training, "seed": self.seed}, f"the settings of {self.name}")

    def stages(self, paths: RunPaths) -> list[Stage]:
        """Train, then score."""
        config, folder = self.training_config, paths.run
        stages = [training_stage(self.workload, config, folder)]
        if self.start is not None:
            own, folder = self.own_config, paths.continued / self.row
            trained, score = str(config.model.score), str(own.model.score)
            going_on = Continuation(
                start=str(paths.run / MODEL),
                weights=UNKNOWN,
                trained=None if trained == score else trained,
            )
            config = own.model_copy(update={"continued": going_on})
            stages.append(training_stage(self.workload, config, folder))
        return [*stages, self._scoring(paths, config)]

    def _scoring(self, paths: RunPaths, config: MaskedConfig) -> Stage:
        folder = paths.run if self.start is None else paths.continued / self.row

        def measure(data: TokenData, note: Note) -> pl.DataFrame:
            model = trained(MaskedLM, folder, config)
            texts = held_out(data, config, self.evaluation)
            who, scored, exits = _scored(self, "masked", model, texts, data, note)
            depth = exits + _by_depth(model, config, texts, self.evaluation.max_tokens, note)
            return joined(
                [
                    identified(who, scored),
                    identified(replace(who, protocol="depth"), depth),
                    training_facts(who, _facts(config)),
                ]
            )

        return measuring_stage(folder, "scores", measure, self._cost(config, PASSES), "diagnostics")

    def _cost(self, config: MaskedConfig, passes: int) -> Any:
        """Every token that is read, counted as often as a pass costs more than reading."""
        length = config.model.train_length
        tokens = self.evaluation.max_windows * length * passes
        flops = stack_flops(config.model, length).forward
        return lambda: Cost(scored=tokens, flops=tokens * flops)


class GridRun(EncoderRun):
    """One row in the robustness grid: every setting of it, one after another."""

    kind: Literal["realformer-grid"] = "realformer-grid"  # type: ignore[assignment]
    grid: GridSettings

    @property
    def readings(self) -> int:
        """No row of the table."""
        return 0

    @property
    def training_config(self) -> MaskedConfig:
        """The settings of the first training."""
        return next(config for _, config in self._configs())

    def stages(self, paths: RunPaths) -> list[Stage]:
        """Train and score each setting; one that diverges is a result as the others are."""
        stages: list[Stage] = []
        for factors, config in self._configs():
            name = "rate{learning_rate:g}-dropout{dropout:g}-warmup{warmup}".format_map(factors)
            folder = paths.continued / name
            stages.append(training_stage(self.workload, config, folder, essential=False))

            def score(
                data: TokenData,
                note: Note,
                config: MaskedConfig = config,
                folder: Path = folder,
                factors: dict[str, Factor] = factors,
            ) -> pl.DataFrame:
                lost = divergence(folder)
                if lost is not None:
                    return self.diverged(lost.step, lost.where, **factors)
                model = trained(MaskedLM, folder, config)
                texts = held_out(data, config, self.evaluation)
                who, scored, _ = _scored(self, "grid", model, texts, data, note, **factors)
                return identified(who, scored)

            stages.append(
                measuring_stage(folder, "scores", score, self._cost(config, 1), "diagnostics")
            )
        return stages

    def _configs(self) -> Iterator[tuple[dict[str, Factor], MaskedConfig]]:
        """What each training is varied in, and its settings."""
        grid = self.grid
        for warmup, dropout, rate in product((grid.warmup_steps, 0), grid.dropouts, grid.rates):
            changes = {
                "steps": grid.steps,
                "schedule.warmup_steps": warmup,
                "model.dropout": dropout,
                "model.exits": False,
                "optimiser.lr": rate,
                "seed": self.seed,
            }
            subject = f"the settings of {self.name} at {rate:g}, {dropout:g}, {warmup}"
            factors: dict[str, Factor] = {"learning_rate": rate, "dropout": dropout}
            yield (
                factors | {"warmup": warmup},
                MaskedConfig.parse(merged(self.training, changes), subject),
            )


def held_out(data: TokenData, config: MaskedConfig, settings: ScoringSettings) -> MaskedSet:
    """The texts that every model of a study is scored on, hidden once."""
    masking = config.masking.of(config.model.vocab_size)
    split, length = data.split(settings.split), config.model.train_length
    return masked_set(split, length, masking, settings.max_windows, settings.seed)


def _scored(
    run: EncoderRun,
    protocol: str,
    model: MaskedLM,
    texts: MaskedSet,
    data: TokenData,
    note: Note,
    **factors: Factor,
) -> tuple[Identity, list[pl.DataFrame], list[pl.DataFrame]]:
    """Whose scores they are, the scores of hidden tokens, and the hits after each layer."""
    scores = score_masked(
        model, texts, run.evaluation.max_tokens, lambda done, total: note(done, total, "scoring")
    )
    unigram = unigram_loss(data.train, texts, model.config.vocab_size)
    split, length = run.evaluation.split, texts.length
    who = identity_of(
        run, protocol, model, data=texts.fingerprint, split=split, length=length, factors=factors
    )
    scored = [
        sums("accuracy", scores.documents, scores.correct[:, -1], scores.tokens),
        sums("loss", scores.documents, scores.loss, scores.tokens),
        sums("unigram_loss", scores.documents, unigram, scores.tokens),
    ]
    exits = by_layer("exit_accuracy", scores.documents, scores.correct, scores.tokens)
    return who, scored, exits


def _by_depth(
    model: MaskedLM, config: MaskedConfig, texts: MaskedSet, most: int, note: Note
) -> list[pl.DataFrame]:
    """What happens in each layer: documents are the units, of gradients batches of texts."""
    documents, indices = documents_of(texts)
    depths = measure_depth(
        model, texts, indices, most, lambda done, total: note(done, total, "layer by layer")
    )
    windows = np.bincount(indices, minlength=len(documents))
    parts = by_layer("variance", documents, depths.variance, windows, first=0)
    parts += by_layer("entropy", documents, depths.entropy, windows)
    parts += by_layer("agreement", documents, depths.agreement, windows, first=2)
    parts += by_layer("agreement_mean", documents, depths.agreement_mean, windows, first=2)
    # The model as its training began, too.
    torch.manual_seed(derive_seed(config.seed, "initialisation"))
    begun = with_weights(config)
    start = new_model(MaskedLM, begun.model, begun.continued).to(choose_device(begun.device))
    for name, of in (("gradients", model), ("gradients_start", start)):
        norms = np.array(layer_gradients(of, texts, most))
        # Layers that share their weights have no gradient of their own.
        if norms.size:
            batches = [f"batch {number:04}" for number in range(len(norms))]
            parts += by_layer(name, batches, norms, np.ones(len(norms)))
    return parts


def _facts(config: MaskedConfig) -> dict[str, float | int]:
    """The numbers of the training that a reader of the table asks for."""
    model = config.model
    return {
        "layers": model.layers,
        "dim": model.dim,
        "parameters": planned_parameters(MaskedLM, model),
        "planned_steps": config.steps,
        "learning_rate": config.optimiser.lr,
        "dropout": model.dropout,
        "warmup": config.schedule.warmup_steps,
    }


def by_layer(
    statistic: str, units: Sequence[str], above: ArrayLike, of: ArrayLike, first: int = 1
) -> list[pl.DataFrame]:
    """Sums (units, layers) over counts (units,) as rows of the layers `first`, `first` + 1, …"""
    columns = np.asarray(above, dtype=np.float64).T
    return [sums(statistic, units, column, of, layer=n) for n, column in enumerate(columns, first)]
