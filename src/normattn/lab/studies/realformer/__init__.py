"""Do residual attention scores make a better encoder? (RealFormer, arXiv 2012.11747, kexue 8027)

Masked language models that differ in where norms stand and in whether scores are carried from layer
to layer are trained alike. They are compared in what they predict, in what happens layer by layer,
and in the learning rates and dropouts that they tolerate, with and without warm-up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from normattn.errors import InputError
from normattn.lab.data import TokenData
from normattn.lab.stats import Identity
from normattn.lab.stats.measurements import Factor
from normattn.lab.studies.realformer.page import PAGE
from normattn.lab.studies.realformer.scoring import ScoreStage, held_out
from normattn.lab.studies.realformer.settings import (
    ROWS,
    GridSettings,
    LookSettings,
    RealFormerPreset,
    SizeSettings,
    checked_rows,
    row_training,
    whole_training,
)
from normattn.lab.sweep.collect import measured_below
from normattn.lab.sweep.layout import CellPaths
from normattn.lab.sweep.settings import merged
from normattn.lab.sweep.stages import UNKNOWN, Stage, TrainStage
from normattn.lab.sweep.study import (
    Cell,
    Request,
    Study,
    Sweep,
    SweepConfig,
    opened_as,
    refuse_choices,
    seeds_of,
    sweep_of,
)
from normattn.lab.training.init_from import Continuation
from normattn.lab.training.tasks.text import MaskedConfig, MaskedWorkload

KIND, GRID = "realformer", "realformer-grid"


class RealFormerConfig(SweepConfig):
    """What the study's cells share; `training` has the whole settings of each size."""

    training: dict[str, dict[str, Any]]
    sizes: dict[str, SizeSettings]
    grid: GridSettings
    evaluation: LookSettings


class EncoderCell(Cell):
    """One row of the table at one size; `training` is whole but for the seed.

    `start` is the same of the row whose trained weights initialise it.
    """

    kind: Literal["realformer"] = "realformer"
    row: str
    size: str
    training: dict[str, Any]
    evaluation: LookSettings
    # Left out of a dump where there is none: cells that were made before it stay the same.
    start: Annotated[dict[str, Any] | None, Field(exclude_if=lambda start: start is None)] = None

    @property
    def workload(self) -> MaskedWorkload:
        """A masked language model."""
        return MaskedWorkload()

    @property
    def training_config(self) -> MaskedConfig:
        """The settings of this cell's first training run."""
        return self._whole(self.start or self.training)

    def _whole(self, training: dict[str, Any]) -> MaskedConfig:
        return MaskedConfig.parse({**training, "seed": self.seed}, f"the settings of {self.name}")

    def identity(self, protocol: str, **factors: Factor) -> Identity:
        """The row of the table, at this size."""
        whose = super().identity(protocol, size=self.size, **factors)
        return replace(whose, row=self.row, score=str(self._whole(self.training).model.score))

    def stages(self, paths: CellPaths) -> list[Stage]:
        """Train, then score."""
        config, folder = self.training_config, paths.run
        stages: list[Stage] = [TrainStage(self.workload, config, folder)]
        if self.start is not None:
            folder = paths.continued / self.row
            config = _continued(self._whole(self.training), config, paths)
            stages.append(TrainStage(self.workload, config, folder))
        return [*stages, ScoreStage(folder, self, config, self.evaluation)]


def _continued(config: MaskedConfig, start: MaskedConfig, paths: CellPaths) -> MaskedConfig:
    """The settings of a run initialised from the model of `start`, whatever its score."""
    scores = [str(run.model.score) for run in (config, start)]
    trained = None if scores[0] == scores[1] else scores[1]
    going_on = Continuation(start=str(paths.run / "model"), weights=UNKNOWN, trained=trained)
    return config.model_copy(update={"continued": going_on})


class GridCell(EncoderCell):
    """One row in the robustness grid: every setting of it, one after another."""

    kind: Literal["realformer-grid"] = "realformer-grid"  # type: ignore[assignment]
    grid: GridSettings

    @property
    def readings(self) -> int:
        """No row of the table."""
        return 0

    @property
    def training_config(self) -> MaskedConfig:
        """The settings of the first run."""
        return next(config for _, config in self._configs())

    def stages(self, paths: CellPaths) -> list[Stage]:
        """Train and score each setting; one that diverges is a result as the others are."""
        stages: list[Stage] = []
        for factors, config in self._configs():
            name = "rate{learning_rate:g}-dropout{dropout:g}-warmup{warmup}".format_map(factors)
            folder = paths.continued / name
            stages.append(TrainStage(self.workload, config, folder, essential=False))
            stages.append(ScoreStage(folder, self, config, self.evaluation, factors))
        return stages

    def _configs(self) -> Iterator[tuple[dict[str, float | int], MaskedConfig]]:
        """What each run is trained with."""
        grid = self.grid
        for warmup in (grid.warmup_steps, 0):
            for dropout in grid.dropouts:
                for rate in grid.rates:
                    changes = {
                        "steps": grid.steps,
                        "schedule.warmup_steps": warmup,
                        "model.dropout": dropout,
                        "model.exits": False,
                        "optimiser.lr": rate,
                        "seed": self.seed,
                    }
                    fields = merged(self.training, changes)
                    subject = f"the settings of {self.name} at {rate:g}, {dropout:g}, {warmup}"
                    varied = {"learning_rate": rate, "dropout": dropout, "warmup": warmup}
                    yield varied, MaskedConfig.parse(fields, subject)


def resolve(request: Request) -> Sweep:
    """The study that a request asks for; `--variants` choose rows, and then there is no grid.

    Raises `InputError` for settings that cannot be, unknown rows and methods.
    """
    preset = opened_as(request, KIND, RealFormerPreset)
    refuse_choices(request, KIND)
    training = {size: whole_training(preset, size) for size in preset.sizes}
    if preset.grid.size not in training:
        raise InputError(f"grid.size is {preset.grid.size}; there are {', '.join(training)}")
    config = RealFormerConfig.of(preset, training=training)
    cells = [*_table(request, preset, config), *_grid(request, config)]
    if not cells:
        raise InputError("none of the rows that were asked for is trained at any size")
    flops = {}
    # Seeds cost the same. Settings that cannot be are refused now.
    for cell in {cell.variant: cell for cell in cells}.values():
        flops[cell.variant] = sum(stage.cost.flops for stage in cell.stages(_NOWHERE))
    # The longest first, so that no core waits for them at the end.
    cells.sort(key=lambda cell: -flops[cell.variant])
    return sweep_of(request, KIND, config, cells, _describe, _facts(config, cells))


_NOWHERE = CellPaths.of(Path("nowhere"), "none", 0)


def _table(
    request: Request, preset: RealFormerPreset, config: RealFormerConfig
) -> Iterator[EncoderCell]:
    try:
        wanted = checked_rows(request.variants or tuple(ROWS), "--variants")
    except ValueError as error:
        raise InputError(str(error)) from error
    for size, settings in config.sizes.items():
        seeds = seeds_of(request, preset)
        if request.seeds is None and settings.seeds is not None:
            seeds = tuple(range(settings.seeds))
        for row in tuple(ROWS) if settings.rows is None else settings.rows:
            if row not in wanted:
                continue
            start = ROWS[row].start
            for seed in seeds:
                yield EncoderCell(
                    variant=f"{size}-{row}",
                    seed=seed,
                    row=row,
                    size=size,
                    training=row_training(config.training[size], row, settings.rates),
                    evaluation=config.evaluation,
                    start=None
                    if start is None
                    else row_training(config.training[size], start, settings.rates),
                )


def _grid(request: Request, config: RealFormerConfig) -> Iterator[GridCell]:
    if request.variants is not None:
        return
    grid = config.grid
    for row in grid.rows:
        for seed in range(grid.seeds):
            yield GridCell(
                variant=f"grid-{row}",
                seed=seed,
                row=row,
                size=grid.size,
                training=row_training(config.training[grid.size], row),
                evaluation=config.evaluation,
                grid=grid,
            )


def _facts(config: RealFormerConfig, cells: Sequence[Cell]) -> tuple[tuple[str, str], ...]:
    trained = {cell.size for cell in cells if isinstance(cell, EncoderCell)}
    sizes = [
        f"{size}: {fields['model']['layers']} layers of width {fields['model']['dim']}"
        for size, fields in config.training.items()
        if size in trained
    ]
    facts = [("sizes", "; ".join(sizes))]
    if any(isinstance(cell, GridCell) for cell in cells):
        grid = config.grid
        settings = 2 * len(grid.rates) * len(grid.dropouts)
        facts.append(("robustness grid", f"{len(grid.rows)} rows, {settings} settings each"))
    return tuple(facts)


def _describe(cell: Cell, data: TokenData) -> list[str]:
    assert isinstance(cell, EncoderCell)
    texts = held_out(data, cell.training_config, cell.evaluation)
    if isinstance(cell, GridCell):
        return []
    corpus = cell.training_config.data.corpus
    return [
        f"corpus {corpus}: {data.train.total:,} training tokens in {len(data.train):,} documents; "
        f"{len(texts)} texts of {len(set(texts.documents))} held-out documents are scored"
    ]


STUDY = Study(
    name=KIND,
    help="Residual scores beside the placements of the norm, in masked language models.\n\n"
    "Trains an encoder in each placement, at equal and at half the steps, over learning rates and "
    "dropouts, with and without warm-up; scores each on hidden tokens of held-out text and "
    "measures it layer by layer.",
    resolve=resolve,
    cells=(EncoderCell, GridCell),
    page=PAGE,
    variants="Rows, by commas; then there is no robustness grid. [default: all of the study's]",
    examples=(
        ("--preset smoke", "the whole path, small"),
        ("", "the study itself; --plan says how long it takes here"),
        ("--variants PostLN,RealFormer --seeds 5", "two rows, five models each"),
        ("--preset gpu-base --corpus my-text/ --plan", "BERT-Base: its cost"),
    ),
    collect=partial(measured_below, factors=("size",)),
)
