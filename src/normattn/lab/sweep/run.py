"""A run, its stages, and a sweep of runs as a request makes it.

A run is one child process's work: it trains a variant with one seed and measures the model, stage
by stage. Each stage is done once, in a directory of its own.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

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
from normattn.lab.sweep.paths import RunPaths, peek
from normattn.lab.training import LoopConfig, StepReport, TrainingConfig
from normattn.lab.training.distributed import choose_device
from normattn.lab.training.init_from import Continuation
from normattn.lab.training.planning import Cost
from normattn.lab.training.task import Probe
from normattn.lab.training.tasks.base import MODEL, ModelTrainingConfig, train_model
from normattn.lab.training.tasks.text import MaskedConfig
from normattn.models.pretrained import load_as
from normattn.settings import Settings, first_difference

CORPUS = "training.data.corpus"
EVALUATIONS = "evaluations"
UNKNOWN = "0" * 64
"""The digest of weights that are not trained yet."""
Config = TypeVar("Config", bound=LoopConfig)
Note = Callable[[int, int, str], None]
"""Receives how much of a stage is done, of how much, and a few words."""


@dataclass(frozen=True)
class Stage:
    """One step of a run; a finished one is found done and costs nothing again.

    `cost` is what the whole stage takes, done or not; `is_done` says whether nothing is left to do
    (a training that diverged has ended too). `run` does what is not yet done with the data that the
    run prepared: it raises `Interrupted` when stopped, with its state saved, and `DivergedError`
    for a divergence that ends the whole run. `trains` are the settings of a training.
    """

    phase: str
    cost: Callable[[], Cost]
    is_done: Callable[[], bool]
    run: Callable[[Any, Note], None]
    trains: LoopConfig | None = None


def training_stage(
    config: ModelTrainingConfig,
    folder: Path,
    essential: bool = True,
) -> Stage:
    """Train `config` in `folder`. Where an `essential` training diverges, the run ends.

    A configuration that continues a model which an earlier stage trains has `UNKNOWN` weights:
    they are looked up when the stage runs.
    """

    def train(data: Any, note: Note) -> None:
        def on_step(report: StepReport) -> None:
            rate = f"{report.tokens_per_second:,.0f} tokens/s"
            note(report.step, report.steps, f"loss {report.loss:.3f}, {rate}")

        status = read_status(folder)
        try:
            # NaN once is NaN again, so it is not tried twice.
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
        ended = status is not None and status.state in ("finished", "diverged")
        return ended and _holds(folder, config, config.changeable)

    return Stage("training", config.cost, is_done, train, config)


def diagnostics_probes(config: LoopConfig) -> tuple[Probe, ...]:
    """A probe of every layer, where `inspect_every` asks for one."""
    return (DiagnosticsProbe(config.inspect_every),) if config.inspect_every else ()


def _holds(run: Path, config: LoopConfig, changeable: frozenset[str]) -> bool:
    """Whether the training in `run` is of these settings; the model it began from may be any.

    A setting that did not exist when the run was trained has its default.
    """
    stored = peek(run / "config.json").get("config")
    if not stored:
        return True
    try:
        whole = type(config).model_validate(stored).model_dump(mode="json")
    except ValueError:
        return False
    free = changeable | {"continued.start", "continued.weights"}
    return first_difference(whole, config.model_dump(mode="json"), free) is None


def with_weights(config: Config) -> Config:
    """The configuration with the weights that its start holds by now."""
    planned = config.continued if isinstance(config, TrainingConfig | MaskedConfig) else None
    if planned is None or planned.weights != UNKNOWN:
        return config
    weights = Continuation.of(Path(planned.start)).weights
    return config.model_copy(update={"continued": planned.model_copy(update={"weights": weights})})


class Run(Settings, ABC):
    """One training of a variant with one seed, and what is measured of its model.

    `training` are the whole settings but for the seed. `row` is what tables call it (default: the
    variant), `score` what it trains (default: the row), `factors` what else the study varies. Runs
    of a study differ in (variant, seed), which also name their directories. A run that trains
    several models has its own `stages`.
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
        """The settings of this training, checked."""
        fields = {**self.training, "seed": self.seed}
        return self.training_class.parse(fields, f"the settings of {self.name}")

    def stages(self, paths: RunPaths) -> list[Stage]:
        """What the run does, in order: train, then measure the model."""
        config = self.training_config
        return [training_stage(config, paths.run), self.measuring(paths.run, config)]

    @abstractmethod
    def measuring(self, folder: Path, config: Any) -> Stage:
        """The stage that measures what was trained with `config` in `folder`."""

    def model_in(self, folder: Path, config: Any) -> Any:
        """The model that was trained with `config` in `folder`, on its device."""
        kind = self.training_class.model_class
        return load_as(kind, folder / MODEL, config.model).to(choose_device(config.device))

    @property
    def name(self) -> str:
        """How progress and errors call this run."""
        return f"{self.variant} seed {self.seed}"

    @property
    def reads(self) -> tuple[str, str]:
        """Runs that agree in this read the same data: the kind, and the settings of the data."""
        data = self.training_config.model_dump(mode="json").get("data")
        return self.kind, canonical_json(data)

    @property
    def readings(self) -> int:
        """How many rows of the table the run gives."""
        return 1

    def identity(self, protocol: str, **known: Any) -> Identity:
        """Whose measurement it is: the row, the seed, the factors, and further fields `known`."""
        row = self.row or self.variant
        whose = {"row": row, "score": self.score or row, "seed": self.seed, "protocol": protocol}
        return Identity(**{"study": "", "factors": self.factors, **whose, **known})


class MeasuredRun(Run):
    """A run whose model is measured once, by `measure`."""

    record: ClassVar[str]
    """The name of what `measure` returns, among the evaluations of the training."""
    phase: ClassVar[str] = "evaluation"

    def measuring(self, folder: Path, config: Any) -> Stage:
        """Measure the model that was trained with `config` in `folder`, once."""
        store = MeasurementStore(folder / EVALUATIONS)

        def run(data: Any, note: Note) -> None:
            store.once(self.record, lambda: self.measure(folder, config, data, note))

        return Stage(self.phase, lambda: self.cost(config), store.path(self.record).is_file, run)

    @abstractmethod
    def measure(self, folder: Path, config: Any, data: Any, note: Note) -> pl.DataFrame:
        """What is measured of the model in `folder`."""

    @abstractmethod
    def cost(self, config: Any) -> Cost:
        """What measuring takes."""


def canonical_json(settings: object) -> str:
    """Settings as one text that is equal where they are."""
    return json.dumps(settings, sort_keys=True)


@dataclass(frozen=True)
class Request:
    """What the command line asks for; None leaves a choice to the preset.

    `changes` are settings by dotted name, as `{"training.steps": 100}`; `launcher` is where the
    runs execute, which no digit depends on.
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
        """The options that choose runs and how they are read, as they are typed."""
        seeds, count = self.seeds, len(self.seeds or ())
        # One number is how many there are, from 0 on; with a comma it is the seed itself.
        counted = str(count) if seeds == tuple(range(count)) else ",".join(map(str, seeds or ()))
        given = {
            "variants": self.variants and ",".join(self.variants),
            "methods": self.methods and ",".join(self.methods),
            "seeds": seeds and (f"{counted}," if count == 1 and seeds != (0,) else counted),
        }
        return {name: text for name, text in given.items() if text}

    def seeds_or(self, count: int) -> tuple[int, ...]:
        """The seeds asked for, or the preset's number of them."""
        return self.seeds or tuple(range(count))


@dataclass(frozen=True)
class Sweep:
    """A resolved request: the shared settings, the runs, and why rows were left out (`skipped`).

    `study` is the study's name. `facts` are further lines of the plan; `describe` receives a run
    and its data, once for each kind of data, and returns lines that describe it (`InputError` where
    it does not suffice).
    """

    study: str
    config: SweepConfig
    runs: tuple[Run, ...]
    out: Path
    describe: Callable[[Any, Any], Sequence[str]] = lambda run, data: ()
    facts: tuple[tuple[str, str], ...] = ()
    skipped: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, request: Request, study: str, config: SweepConfig, runs: Sequence[Run], **more: Any
    ) -> Sweep:
        """The sweep of these runs, where the request wants it; each variant's settings are checked.

        A run that was named twice is one. Raises `InputError` for settings that cannot be.
        """
        once = {(run.variant, run.seed): run for run in runs}
        for run in {run.variant: run for run in reversed(once.values())}.values():
            _ = run.training_config
        out = request.out or Path("runs") / f"{study}-{config.preset}"
        return cls(study, config, tuple(once.values()), out, **more)

    def stages(self, run: Run) -> list[Stage]:
        """The stages of one of the runs, in this sweep's directory."""
        return run.stages(self.paths(run))

    def paths(self, run: Run) -> RunPaths:
        """Where a run keeps what."""
        return RunPaths.of(self.out, run.variant, run.seed)


class Experiment(Protocol):
    """What running a study needs of it: `normattn.lab.studies.base.Study` is one."""

    name: str
    runs: tuple[type[Run], ...]
    page: Page
    headline: tuple[str, ...]
    source: Path | None

    def resolve(self, request: Request) -> Sweep:
        """The sweep of a request."""

    def run(self, fields: Mapping[str, Any], where: str) -> Run:
        """The run that these fields describe."""

    def measurements(self, out: Path) -> pl.DataFrame:
        """Everything that was measured below `out`."""

    def report(self, measured: pl.DataFrame, out: Path, config: Mapping[str, Any]) -> Written:
        """Write the report of these measurements into `out`."""
