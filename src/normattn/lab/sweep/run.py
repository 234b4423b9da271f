"""A run, its stages, each of which is done once, and the sweep of runs that a request asks for."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

import polars as pl
from pydantic import Field

from normattn.errors import DivergedError
from normattn.lab.diagnostics import DiagnosticsProbe
from normattn.lab.report.output import Written
from normattn.lab.report.page import Page
from normattn.lab.runs import read_status
from normattn.lab.stats import Identity, MeasurementStore
from normattn.lab.stats.measurements import Factor
from normattn.lab.sweep.config import SweepConfig
from normattn.lab.sweep.launchers import Launcher, Local
from normattn.lab.sweep.paths import RunPaths, read_or_empty
from normattn.lab.training import LoopConfig, StepReport, TrainingConfig
from normattn.lab.training.distributed import choose_device
from normattn.lab.training.init_from import Continuation
from normattn.lab.training.planning import Cost
from normattn.lab.training.task import Probe
from normattn.lab.training.tasks.base import MODEL, ModelTrainingConfig, train_model
from normattn.lab.training.tasks.text import MaskedConfig
from normattn.models.pretrained import load_as
from normattn.settings import Settings, first_difference

EVALUATIONS = "evaluations"
UNKNOWN = "0" * 64
"""The placeholder digest of weights that are not trained yet."""
Config = TypeVar("Config", bound=LoopConfig)
Progress = Callable[[int, int, str], None]
"""Receives the progress of a stage: (done, total, text)."""


@dataclass(frozen=True)
class Stage:
    """One step of a run, which is skipped when it is done.

    - `phase`: its name in progress. `cost`: the cost of the whole stage, done or not.
    - `is_done`: whether nothing is left to do; a training that diverged is done.
    - `run(data, progress)`: does the remaining work. Raises `Interrupted` when stopped, with its
      state saved, and `DivergedError` for a divergence that ends the run.
    - `trains`: the settings of a training.
    """

    phase: str
    cost: Callable[[], Cost]
    is_done: Callable[[], bool]
    run: Callable[[Any, Progress], None]
    trains: LoopConfig | None = None


def training_stage(config: ModelTrainingConfig, folder: Path, essential: bool = True) -> Stage:
    """A stage that trains `config` in `folder`. A divergence ends the run if `essential`.

    `UNKNOWN` weights, those of an earlier stage, are hashed when this stage runs.
    """

    def train(data: Any, progress: Progress) -> None:
        def on_step(report: StepReport) -> None:
            rate = f"{report.tokens_per_second:,.0f} tokens/s"
            progress(report.step, report.steps, f"loss {report.loss:.3f}, {rate}")

        status = read_status(folder)
        try:
            # Training is deterministic, so a divergence would repeat.
            if status is not None and status.state == "diverged":
                raise DivergedError(status.step, status.where, status.checkpoint)
            train_model(
                with_weights(config),
                folder,
                on_step=on_step,
                probes=diagnostics_probes(config),
                show_progress=False,
            )
        except DivergedError:
            if essential:
                raise

    def is_done() -> bool:
        status = read_status(folder)
        if status is None or status.state not in ("finished", "diverged"):
            return False
        stored = read_or_empty(folder / "config.json").get("config")
        if not stored:
            return True
        try:  # A setting that did not exist when the run was trained has its default.
            trained = type(config).model_validate(stored).model_dump(mode="json")
        except ValueError:
            return False
        ignored = config.changeable | {"continued.start", "continued.weights"}
        return first_difference(trained, config.model_dump(mode="json"), ignored) is None

    return Stage("training", config.cost, is_done, train, config)


def diagnostics_probes(config: LoopConfig) -> tuple[Probe, ...]:
    """The diagnostics probe, if `inspect_every` is set."""
    return (DiagnosticsProbe(config.inspect_every),) if config.inspect_every else ()


def with_weights(config: Config) -> Config:
    """The configuration with the digest of its initial weights instead of `UNKNOWN`."""
    planned = config.continued if isinstance(config, TrainingConfig | MaskedConfig) else None
    if planned is None or planned.weights != UNKNOWN:
        return config
    weights = Continuation.from_model(Path(planned.start)).weights
    return config.model_copy(update={"continued": planned.model_copy(update={"weights": weights})})


class Run(Settings, ABC):
    """One training of a variant with one seed, and the measurements of its model.

    - `variant`, `seed`: identify the run within a study and name its directories.
    - `row`: its name in tables (default: the variant).
    - `score`: the trained score (default: the row).
    - `factors`: what else the study varies.
    - `training`: all training settings except the seed.

    A run that trains several models overrides `stages`.
    """

    training_class: ClassVar[type[ModelTrainingConfig]]

    kind: str
    variant: str
    seed: int = 0
    row: str = ""
    score: str = ""
    factors: dict[str, Factor] = Field(default_factory=dict)
    training: dict[str, Any]

    @property
    def training_config(self) -> Any:
        """The validated settings of the training."""
        fields = {**self.training, "seed": self.seed}
        return self.training_class.parse(fields, f"the settings of {self.name}")

    def stages(self, paths: RunPaths) -> list[Stage]:
        """The stages in order: train, then measure the model."""
        config = self.training_config
        return [training_stage(config, paths.run), self.measurement_stage(paths.run, config)]

    @abstractmethod
    def measurement_stage(self, folder: Path, config: Any) -> Stage:
        """The stage that measures what was trained with `config` in `folder`."""

    def load_trained(self, folder: Path, config: Any) -> Any:
        """The model that was trained with `config` in `folder`, on its device."""
        kind = self.training_class.model_class
        return load_as(kind, folder / MODEL, config.model).to(choose_device(config.device))

    @property
    def name(self) -> str:
        """The run's name in progress and error messages."""
        return f"{self.variant} seed {self.seed}"

    @property
    def data_key(self) -> tuple[str, str]:
        """(kind, settings of the data); runs with equal keys use the same data."""
        data = self.training_config.model_dump(mode="json").get("data")
        return self.kind, canonical_json(data)

    def identity(self, protocol: str, **fields: Any) -> Identity:
        """The identity of a measurement of this run; `fields` are its other fields."""
        row = self.row or self.variant
        score = self.score or row
        identity = Identity("", row, score, self.seed, protocol, factors=self.factors)
        return replace(identity, **fields)


class MeasuredRun(Run):
    """A run whose model is measured once, by `measure`."""

    record: ClassVar[str]
    """The key of the measurements in the store of the training."""
    phase: ClassVar[str] = "evaluation"

    def measurement_stage(self, folder: Path, config: Any) -> Stage:
        """The stage that measures the model that was trained with `config` in `folder`."""
        store = MeasurementStore(folder / EVALUATIONS)

        def run(data: Any, progress: Progress) -> None:
            store.once(self.record, lambda: self.measure(folder, config, data, progress))

        return Stage(self.phase, lambda: self.cost(config), store.path(self.record).is_file, run)

    @abstractmethod
    def measure(self, folder: Path, config: Any, data: Any, progress: Progress) -> pl.DataFrame:
        """The measurements of the model in `folder`."""

    @abstractmethod
    def cost(self, config: Any) -> Cost:
        """The cost of measuring."""


def canonical_json(settings: object) -> str:
    """Settings as text; equal settings give equal texts."""
    return json.dumps(settings, sort_keys=True)


@dataclass(frozen=True)
class Request:
    """The options of the command line; None leaves a choice to the preset.

    `changes` are settings by dotted name, such as `{"training.steps": 100}`. `launcher` is where
    the runs execute; no result depends on it.
    """

    preset: str = "laptop"
    variants: tuple[str, ...] | None = None
    methods: tuple[str, ...] | None = None
    seeds: tuple[int, ...] | None = None
    jobs: int | None = None
    out: Path | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)
    launcher: Launcher = field(default_factory=Local)

    @property
    def choices(self) -> dict[str, str]:
        """The options that choose runs and methods, as they are typed."""
        seeds, count = self.seeds or (), len(self.seeds or ())
        # A single number is a count of seeds, from 0 on; with a comma it is a seed.
        text = str(count) if seeds == tuple(range(count)) else ",".join(map(str, seeds))
        options = {
            "variants": self.variants and ",".join(self.variants),
            "methods": self.methods and ",".join(self.methods),
            "seeds": seeds and (f"{text}," if count == 1 and seeds != (0,) else text),
        }
        return {name: value for name, value in options.items() if value}

    def seeds_or(self, count: int) -> tuple[int, ...]:
        """The requested seeds, or the first `count`."""
        return self.seeds or tuple(range(count))


@dataclass(frozen=True)
class Sweep:
    """The runs of a request, with their shared settings.

    - `study`: the study's name.
    - `describe(run, data)`: lines that describe the data; called once for each data. Raises
      `InputError` where the data does not suffice.
    - `skipped`: sentences on rows that were left out.
    """

    study: str
    config: SweepConfig
    runs: tuple[Run, ...]
    out: Path
    describe: Callable[[Any, Any], Sequence[str]] = lambda run, data: ()
    skipped: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, request: Request, study: str, config: SweepConfig, runs: Sequence[Run], **fields: Any
    ) -> Sweep:
        """The sweep of these runs without duplicates, in the request's directory.

        Raises `InputError` for impossible training settings.
        """
        unique = {(run.variant, run.seed): run for run in runs}
        for run in {run.variant: run for run in reversed(unique.values())}.values():
            _ = run.training_config  # raises where the settings are impossible
        out = request.out or Path("runs") / f"{study}-{config.preset}"
        return cls(study, config, tuple(unique.values()), out, **fields)

    def stages(self, run: Run) -> list[Stage]:
        """The stages of a run in this sweep's directory."""
        return run.stages(self.paths(run))

    def paths(self, run: Run) -> RunPaths:
        """The paths of a run."""
        return RunPaths.of(self.out, run.variant, run.seed)


@runtime_checkable
class Experiment(Protocol):
    """What the runner needs of a study; implemented by `normattn.lab.studies.base.Study`."""

    name: str
    runs: tuple[type[Run], ...]
    page: Page
    source: Path | None

    def resolve(self, request: Request) -> Sweep:
        """The sweep of a request."""

    def run(self, fields: Mapping[str, Any], where: str) -> Run:
        """The run that these fields describe."""

    def measurements(self, out: Path) -> pl.DataFrame:
        """All measurements below `out`."""

    def report(self, measured: pl.DataFrame, out: Path, config: Mapping[str, Any]) -> Written:
        """Write the report of these measurements into `out`."""
