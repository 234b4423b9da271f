"""RealFormer's claims, tested on a masked language model (arXiv 2012.11747, kexue 8027).

Encoders that differ in where norms stand and in whether scores are carried from layer to layer are
trained alike; they are compared in what they predict, in what happens layer by layer, and in which
learning rates and dropouts they survive.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from normattn.data import TokenData
from normattn.errors import InputError
from normattn.reports.realformer import realformer_report
from normattn.reports.realformer_records import Setting, read_encoder, read_failure
from normattn.studies._realformer_settings import (
    ROWS,
    GridSettings,
    LookSettings,
    RealFormerPreset,
    SizeSettings,
    checked_rows,
    row_training,
    whole_training,
)
from normattn.studies._realformer_stages import FAILURE, RECORD, LookStage, held_out
from normattn.studies._tabulate import say_where
from normattn.sweep.layout import CellPaths
from normattn.sweep.merging import merged
from normattn.sweep.stages import Stage, TrainStage
from normattn.sweep.study import (
    Cell,
    Request,
    Sweep,
    SweepConfig,
    opened_as,
    place_of,
    refuse_choices,
    seeds_of,
)
from normattn.training.masked import MaskedConfig, MaskedWorkload

KIND, GRID = "realformer", "realformer-grid"


class RealFormerConfig(SweepConfig):
    """What the study's cells share; `training` has the whole settings of each size."""

    training: dict[str, dict[str, Any]]
    sizes: dict[str, SizeSettings]
    grid: GridSettings
    evaluation: LookSettings


class EncoderCell(Cell):
    """One row of the table at one size; `training` is whole but for the seed."""

    kind: Literal["realformer"] = "realformer"
    row: str
    size: str
    training: dict[str, Any]
    evaluation: LookSettings

    @property
    def workload(self) -> MaskedWorkload:
        """A masked language model."""
        return MaskedWorkload()

    @property
    def training_config(self) -> MaskedConfig:
        """The settings of this cell's training run."""
        what = f"the settings of {self.name}"
        return MaskedConfig.parse({**self.training, "seed": self.seed}, what)

    def stages(self, paths: CellPaths) -> list[Stage]:
        """Train, then look."""
        config = self.training_config
        return [
            # A divergence is put on record by what looks, which then ends the cell.
            TrainStage(self.workload, config, paths.run, essential=False),
            LookStage(config, paths.run, self.evaluation, "table", self.row, self.size),
        ]


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
        found: list[Stage] = []
        for name, config in self._configs():
            place = paths.continued / name
            found.append(TrainStage(self.workload, config, place, essential=False))
            found.append(LookStage(config, place, self.evaluation, "grid", self.row, self.size))
        return found

    def _configs(self) -> Iterator[tuple[str, MaskedConfig]]:
        """A name and the settings of each run."""
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
                    name = f"rate{rate:g}-dropout{dropout:g}-warmup{warmup}"
                    fields = merged(self.training, changes)
                    yield name, MaskedConfig.parse(fields, f"the settings of {self.name}, {name}")


def resolve(request: Request) -> Sweep:
    """The study that a request asks for; `--variants` choose rows, and then there is no grid.

    Raises `InputError` for settings that cannot be, unknown rows and methods.
    """
    preset = opened_as(request, KIND, RealFormerPreset)
    refuse_choices(request, KIND)
    training = {size: whole_training(preset, size) for size in preset.sizes}
    if preset.grid.size not in training:
        raise InputError(f"grid.size is {preset.grid.size}; there are {', '.join(training)}")
    config = RealFormerConfig(
        preset=preset.name,
        training=training,
        sizes=preset.sizes,
        grid=preset.grid,
        evaluation=preset.evaluation,
    )
    cells = [*_table(request, preset, config), *_grid(request, config)]
    if not cells:
        raise InputError("none of the rows that were asked for is trained at any size")
    for cell in cells:
        _ = cell.training_config  # Settings that cannot be are refused now.
    # The longest first, so that no core waits for them at the end.
    cells.sort(key=lambda cell: -sum(stage.cost.flops for stage in cell.stages(_NOWHERE)))
    return Sweep(
        study=KIND,
        config=config,
        cells=tuple(cells),
        skipped=(),
        out=place_of(request, KIND, preset),
        report=report,
        describe=_describe,
        facts=_facts(config, cells),
    )


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
        for row in settings.rows or tuple(ROWS):
            if row not in wanted:
                continue
            for seed in seeds:
                yield EncoderCell(
                    variant=f"{size}-{row}",
                    seed=seed,
                    row=row,
                    size=size,
                    training=row_training(config.training[size], row),
                    evaluation=config.evaluation,
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
    sizes = [
        f"{size}: {fields['model']['layers']} layers of width {fields['model']['dim']}"
        for size, fields in config.training.items()
    ]
    found = [("sizes", "; ".join(sizes))]
    if any(isinstance(cell, GridCell) for cell in cells):
        grid = config.grid
        settings = 2 * len(grid.rates) * len(grid.dropouts)
        found.append(("robustness grid", f"{len(grid.rows)} rows, {settings} settings each"))
    return tuple(found)


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


def report(out: Path) -> None:
    """Write the tables and the figures of what was measured in `out`."""
    places = [*out.glob("cells/*/seed*"), *out.glob("continued/*/seed*/*")]
    records = [read_encoder(path / RECORD) for path in places if (path / RECORD).is_file()]
    failures = [read_failure(path / FAILURE) for path in places if (path / FAILURE).is_file()]
    losses = {
        each.setting: path / "metrics.jsonl"
        for path in places
        if (path / RECORD).is_file()
        for each in [read_encoder(path / RECORD)]
        if each.setting.part == "table"
    }
    records.sort(key=lambda record: _order(record.setting))
    failures.sort(key=lambda failure: _order(failure.setting))
    ordered = dict(sorted(losses.items(), key=lambda item: _order(item[0])))
    say_where(out, len(realformer_report(records, failures, ordered, out)))


def _order(setting: Setting) -> tuple[Any, ...]:
    """Sizes from the smallest, rows as in `ROWS`, then settings and seeds."""
    place = list(ROWS).index(setting.row) if setting.row in ROWS else len(ROWS)
    size = (setting.layers * setting.dim**2, setting.size)
    varied = (-setting.warmup, setting.dropout, setting.learning_rate, setting.seed)
    return (setting.part != "table", *size, place, setting.row, *varied)
