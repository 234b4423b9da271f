"""What the RealFormer study trains and measures: encoders, some of them in a grid of settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import polars as pl
import torch
from numpy.typing import ArrayLike
from pydantic import AfterValidator, Field

from normattn.errors import InputError, unknown_name
from normattn.lab.data.tokens import TokenData
from normattn.lab.data.windows import MaskedSet, masked_set
from normattn.lab.diagnostics.depth import layer_gradients, measure_depth
from normattn.lab.evaluation.masked import documents_of, score_masked, unigram_loss
from normattn.lab.evaluation.scorer import weights_digest
from normattn.lab.stats import concat, scalar, sums, with_identity
from normattn.lab.studies.preset import Positive, StudyPreset, load_preset
from normattn.lab.sweep.config import SweepConfig, merged
from normattn.lab.sweep.paths import RunPaths
from normattn.lab.sweep.run import (
    UNKNOWN,
    MeasuredRun,
    Progress,
    Request,
    Stage,
    Sweep,
    training_stage,
    with_weights,
)
from normattn.lab.training.config import omit_default
from normattn.lab.training.distributed import choose_device
from normattn.lab.training.init_from import Continuation, new_model
from normattn.lab.training.planning import Cost
from normattn.lab.training.task import derive_seed
from normattn.lab.training.tasks.base import MODEL
from normattn.lab.training.tasks.text import MaskedConfig
from normattn.models.config import NORMLESS, Placement
from normattn.models.flops import planned_parameters, stack_flops
from normattn.models.masked_lm import MaskedLM
from normattn.settings import Settings

# Rows


class Encoder(Settings):
    """A row of the table: the placement of norms, the score, and what else differs.

    `half`: half the steps, with a schedule of that length. `start`: the row whose trained weights
    initialise this one.
    """

    placement: Placement = "PostLN"
    score: str = "Baseline"
    shared: bool = False
    half: bool = False
    start: str | None = None


SUMMED = "Baseline-RealFormer"
ROWS: Mapping[str, Encoder] = {
    "PreLN": Encoder(placement="PreLN"),
    "PostLN": Encoder(),
    "RealFormer": Encoder(score=SUMMED),
    "RealFormer-half": Encoder(score=SUMMED, half=True),
    "RealFormer-mean": Encoder(score=f"{SUMMED}(running_mean=true)"),
    "RealFormer-PreLN": Encoder(score=SUMMED, placement="PreLN"),
    "ResidualQK": Encoder(score="Baseline-ResidualQK"),
    "ResidualQKV": Encoder(score="Baseline-ResidualQKV"),
    "ValueResidual": Encoder(score="Baseline-ValueResidual"),
    "AttnRes": Encoder(placement="AttnRes"),
    "DeepNorm": Encoder(placement="DeepNorm"),
    "ReZero": Encoder(placement="ReZero"),
    "ReZeroNoNorm": Encoder(placement="ReZeroNoNorm"),
    "FixedScale": Encoder(placement="FixedScale"),
    "PostLN-shared": Encoder(shared=True),
    "RealFormer-shared": Encoder(score=SUMMED, shared=True),
    "PostLN-continued": Encoder(half=True, start="PostLN"),
    "RealFormer-from-PostLN": Encoder(score=SUMMED, half=True, start="PostLN"),
}
"""All rows in the order of the table."""


def _checked_row(name: str) -> str:
    if name not in ROWS:
        raise unknown_name("row", name, ROWS)
    return name


# Settings

RowName = Annotated[str, AfterValidator(_checked_row)]


class SizeSettings(Settings):
    """A model size: its changes to `training`, its rows, and its seeds (None: the preset's).

    `rows` None means every row, `[]` none. `rates` are the learning rates of rows whose rate
    differs from `training`.
    """

    training: dict[str, Any]
    rows: tuple[RowName, ...] | None = None
    rates: dict[RowName, Positive] = Field(default_factory=dict)
    seeds: int | None = Field(default=None, ge=1)


class GridSettings(Settings):
    """The robustness grid: each of `rows` at every learning rate and dropout, at one `size`.

    Every setting is trained once with `warmup_steps` and once without. No rows: there is no grid.
    """

    size: str
    rows: tuple[RowName, ...] = ("PreLN", "PostLN", "RealFormer")
    rates: tuple[Positive, ...] = Field(min_length=1)
    dropouts: tuple[Annotated[float, Field(ge=0, lt=1)], ...] = Field(min_length=1)
    steps: int = Field(ge=1)
    warmup_steps: int = Field(ge=1)


class ScoringSettings(Settings):
    """The windows of held-out text that a trained encoder is evaluated on.

    `max_tokens` bounds a batch. Gradients are measured for each `gradient_texts` windows.
    """

    max_windows: int = Field(default=256, ge=2)
    max_tokens: int = Field(default=2048, ge=1)
    gradient_texts: Annotated[int, Field(ge=1), omit_default(32)] = 32
    seed: int = Field(default=0, ge=0)
    split: Literal["test", "validation"] = "test"


class RealFormerPreset(StudyPreset):
    """A preset of the study; `training` holds fields of `MaskedConfig`."""

    varied: ClassVar[Mapping[str, Any]] = {
        "model.score": "Baseline",
        "model.placement": "PreLN",
        "model.shared_layers": False,
        "model.exits": False,
    }

    sizes: dict[str, SizeSettings] = Field(min_length=1)
    grid: GridSettings
    evaluation: ScoringSettings = ScoringSettings()


# Runs


class EncoderRun(MeasuredRun):
    """A row of the table at one size, or a setting of the grid, scored on masked tokens.

    `protocol` says which of the two. Rows of the table are also measured layer by layer. `start`
    has the settings of the row whose trained weights initialise this one.
    """

    training_class: ClassVar[type[MaskedConfig]] = MaskedConfig
    record, phase = "scores", "diagnostics"
    kind: Literal["realformer"] = "realformer"
    protocol: Literal["masked", "grid"] = "masked"
    size: str
    evaluation: ScoringSettings
    start: dict[str, Any] | None = None

    @property
    def training_config(self) -> MaskedConfig:
        """The settings of the run's first training."""
        return self._parse(self.start or self.training)

    @property
    def row_config(self) -> MaskedConfig:
        """The settings of the row itself, rather than of its start."""
        return self._parse(self.training)

    def _parse(self, training: Mapping[str, Any]) -> MaskedConfig:
        return MaskedConfig.parse({**training, "seed": self.seed}, f"the settings of {self.name}")

    def stages(self, paths: RunPaths) -> list[Stage]:
        """Train (first the start, where there is one), then measure."""
        if self.start is None:
            return super().stages(paths)
        start, row, folder = self.training_config, self.row_config, paths.continued / self.row
        start_score = str(start.model.score)
        continuation = Continuation(
            start=str(paths.run / MODEL),
            weights=UNKNOWN,
            trained=None if start_score == str(row.model.score) else start_score,
        )
        config = row.model_copy(update={"continued": continuation})
        return [
            training_stage(start, paths.run),
            training_stage(config, folder),
            self.measurement_stage(folder, config),
        ]

    def cost(self, config: MaskedConfig) -> Cost:
        """The cost in forward passes: 1 in the grid, 6 in the table.

        The table also measures attention, and gradients of the loss.
        """
        length, passes = config.model.train_length, 6 if self.protocol == "masked" else 1
        tokens = self.evaluation.max_windows * length * passes
        return Cost(scored=tokens, flops=tokens * stack_flops(config.model, length).forward)

    def measure(
        self, folder: Path, config: MaskedConfig, data: TokenData, progress: Progress
    ) -> pl.DataFrame:
        """Score masked tokens; for the table also measure each layer and note training facts."""
        model, texts = self.load_trained(folder, config), held_out(data, config, self.evaluation)
        max_tokens = self.evaluation.max_tokens
        scores = score_masked(
            model, texts, max_tokens, lambda done, total: progress(done, total, "scoring")
        )
        unigram = unigram_loss(data.train, texts, model.config.vocab_size)
        totals = {"accuracy": scores.correct[:, -1], "loss": scores.loss, "unigram_loss": unigram}
        documents, tokens = scores.documents, scores.tokens
        scored = [sums(name, documents, total, tokens) for name, total in totals.items()]
        measured: dict[str, list[pl.DataFrame]] = {self.protocol: scored}
        if self.protocol == "masked":
            facts = {
                "parameters": planned_parameters(MaskedLM, config.model),
                "planned_steps": config.steps,
                "learning_rate": config.optimiser.lr,
            }
            exits = by_layer("exit_accuracy", documents, scores.correct, tokens)
            measured["depth"] = exits + _measure_layers(model, config, texts, self, progress)
            measured["training"] = [scalar(name, float(facts[name])) for name in facts]
        identity = self.identity(
            self.protocol,
            data=texts.fingerprint,
            split=self.evaluation.split,
            length=texts.length,
            train_length=texts.length,
            weights=weights_digest(model),
        )
        return concat(
            with_identity(replace(identity, protocol=protocol), parts)
            for protocol, parts in measured.items()
        )


# Measurements


def held_out(data: TokenData, config: MaskedConfig, settings: ScoringSettings) -> MaskedSet:
    """The texts that all models of a study are scored on, with the same masked tokens."""
    split, model = data.split(settings.split), config.model
    size, sampling = model.vocab_size, (settings.max_windows, settings.seed)
    return masked_set(split, model.train_length, config.masking, size, *sampling)


def _measure_layers(
    model: MaskedLM, config: MaskedConfig, texts: MaskedSet, run: EncoderRun, progress: Progress
) -> list[pl.DataFrame]:
    """Statistics of each layer; units are documents, for gradients batches of texts."""
    (documents, indices), settings = documents_of(texts), run.evaluation
    depths = measure_depth(
        model, texts, indices, settings.max_tokens, lambda n, of: progress(n, of, "layer by layer")
    )
    windows = np.bincount(indices, minlength=len(documents))
    parts = []
    for name, first in (("variance", 0), ("entropy", 1), ("agreement", 2), ("agreement_mean", 2)):
        parts += by_layer(name, documents, depths[name], windows, first)
    # Gradients are measured at the start of training.
    torch.manual_seed(derive_seed(config.seed, "initialisation"))
    initial = with_weights(config)
    start = new_model(MaskedLM, initial.model, initial.continued).to(choose_device(initial.device))
    norms = np.array(layer_gradients(start, texts, settings.gradient_texts))
    # Layers that share their weights have no separate gradients.
    if norms.size:
        batches = [f"batch {number:04}" for number in range(len(norms))]
        parts += by_layer("gradients_start", batches, norms, np.ones(len(norms)))
    return parts


def by_layer(
    statistic: str, units: Sequence[str], values: ArrayLike, of: ArrayLike, first: int = 1
) -> list[pl.DataFrame]:
    """Rows of sums (units, layers) over counts (units,), for the layers `first`, `first` + 1, …"""
    columns = np.asarray(values, dtype=np.float64).T
    return [sums(statistic, units, column, of, layer=n) for n, column in enumerate(columns, first)]


# From a request to runs


def resolve(request: Request) -> Sweep:
    """The sweep of a request; `--variants` choose rows, and then there is no grid.

    Raises `InputError` for impossible settings and for unknown rows.
    """
    preset = load_preset(request, "realformer", RealFormerPreset)
    training = {
        name: preset.whole_training(MaskedConfig, size.training, subject=f"size {name}")
        for name, size in preset.sizes.items()
    }
    grid, chosen = preset.grid, [_checked_row(name) for name in request.variants or ROWS]
    if grid.size not in training:
        raise InputError(f"grid.size is {grid.size}; there are {', '.join(training)}")
    runs: list[EncoderRun] = []

    def add(seeds: Iterable[int], **fields: Any) -> None:
        run = EncoderRun(evaluation=preset.evaluation, **fields)
        score = str(run.row_config.model.score)
        runs.extend(run.model_copy(update={"score": score, "seed": seed}) for seed in seeds)

    for size, settings in reversed(preset.sizes.items()):
        for name in ROWS if settings.rows is None else settings.rows:
            if name in chosen:
                start, rates = ROWS[name].start, settings.rates
                add(
                    request.seeds_or(settings.seeds or preset.seeds),
                    variant=f"{size}-{name}",
                    row=name,
                    size=size,
                    factors={"size": size},
                    training=row_training(training[size], name, rates),
                    start=row_training(training[size], start, rates) if start else None,
                )
    for name in grid.rows if request.variants is None else ():
        if (start := ROWS[name].start) is not None:
            raise InputError(f"{name} starts from a trained {start}, which the grid does not train")
        row = row_training(training[grid.size], name, {})
        for warmup, dropout, rate in product((grid.warmup_steps, 0), grid.dropouts, grid.rates):
            changes = {
                "steps": grid.steps,
                "schedule.warmup_steps": warmup,
                "model.dropout": dropout,
                "model.exits": False,
                "optimiser.lr": rate,
            }
            varied = {"learning_rate": rate, "dropout": dropout, "warmup": warmup}
            add(
                (0,),
                variant=f"grid-{name}@rate{rate:g}-dropout{dropout:g}-warmup{warmup}",
                row=name,
                size=grid.size,
                factors={"size": grid.size, **varied},
                training=merged(row, changes),
                protocol="grid",
            )
    if not runs:
        raise InputError("none of the selected configurations is trained at any size")
    shared = {"sizes": preset.sizes, "grid": grid, "evaluation": preset.evaluation}
    config = SweepConfig.of(preset.name, training=training, **shared)
    return Sweep.of(request, "realformer", config, runs, describe=_describe)


def row_training(
    training: Mapping[str, Any], name: str, rates: Mapping[str, float]
) -> dict[str, Any]:
    """The training settings of a row of the table, without its seed and its start.

    `rates` are learning rates of rows; a row with a start defaults to the rate of its start.
    Settings of norms are removed where the placement has none. Raises `InputError` where half of
    the steps is less than the warm-up.
    """
    row = ROWS[name]
    changes: dict[str, Any] = {
        "model.placement": row.placement,
        "model.score": row.score,
        "model.shared_layers": row.shared,
        "model.exits": training["model"]["layers"] > 1,
    }
    rate = rates.get(name, rates.get(row.start or name))
    if rate is not None:
        changes["optimiser.lr"] = rate
    if row.half:
        changes["steps"] = max(1, training["steps"] // 2)
        if training["schedule"]["warmup_steps"] > changes["steps"]:
            raise InputError(f"half of {training['steps']} steps is less than their warm-up")
    settings = merged(training, changes)
    if row.placement in NORMLESS:
        for field in ("norm", "norm_gain", "norm_eps"):
            del settings["model"][field]
    return settings


def _describe(run: EncoderRun, data: TokenData) -> list[str]:
    texts = held_out(data, run.training_config, run.evaluation)
    corpus = run.training_config.data.corpus
    return [
        f"corpus {corpus}: {data.train.total:,} training tokens in {len(data.train):,} documents; "
        f"{len(texts)} texts of {len(set(texts.documents))} held-out documents are scored"
    ]
