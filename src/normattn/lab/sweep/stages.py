"""The steps of a cell: train a run, measure it; each is done once, in a directory of its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import polars as pl

from normattn.errors import DivergedError
from normattn.lab.diagnostics import DiagnosticsProbe
from normattn.lab.runs import read_status
from normattn.lab.stats import MeasurementStore
from normattn.lab.sweep.measuring import EVALUATIONS
from normattn.lab.training import LoopConfig, StepReport, TrainingConfig
from normattn.lab.training.init_from import Continuation
from normattn.lab.training.planning import Cost
from normattn.lab.training.task import Probe
from normattn.lab.training.tasks.text import MaskedConfig
from normattn.lab.training.tasks.workload import Workload, train_workload


def diagnostics_probes(config: LoopConfig, run: Path) -> tuple[Probe, ...]:
    """A probe of the run in `run`, at every layer, where `inspect_every` asks for one."""
    if not config.inspect_every:
        return ()
    return (DiagnosticsProbe(config.inspect_every, run=run),)


UNKNOWN = "0" * 64
"""The digest of weights that are not trained yet."""

Config = TypeVar("Config", bound=LoopConfig)

Note = Callable[[int, int, str], None]
"""Told how much of a stage is done, of how much, and a few words."""


class Stage(ABC):
    """One step of a cell; a finished one is found done and costs nothing again."""

    phase: ClassVar[str]

    @property
    @abstractmethod
    def cost(self) -> Cost:
        """What the whole stage takes, done or not."""

    @abstractmethod
    def is_done(self) -> bool:
        """Whether nothing is left to do; a training that diverged has ended too."""

    @abstractmethod
    def run(self, data: Any, note: Note) -> None:
        """Do what is not yet done. `data` is what the cell's workload prepared.

        Raises `Interrupted` when stopped, with its state saved, and `DivergedError` for a
        divergence that ends the whole cell.
        """


@dataclass(frozen=True)
class TrainStage(Stage):
    """Train `config` in `folder`. Where an `essential` one diverges, the cell ends.

    A configuration that goes on from a model which an earlier stage trains says `UNKNOWN` weights:
    they are looked up when the stage runs. `probes` makes what looks into the training, beside
    the diagnostics that the configuration asks for.
    """

    phase = "training"
    workload: Workload[Any, Any]
    config: LoopConfig
    folder: Path
    essential: bool = True
    probes: Callable[[Any], Sequence[Probe]] = lambda data: ()

    @property
    def cost(self) -> Cost:
        """Every target of every step."""
        return self.workload.cost(self.config)

    def is_done(self) -> bool:
        """Whether the training has ended, in a model or in NaN."""
        status = read_status(self.folder)
        return status is not None and status.state in ("finished", "diverged")

    def run(self, data: Any, note: Note) -> None:
        """Train, or resume the training; NaN once is NaN again, so it is not tried twice."""
        before = divergence(self.folder)
        if before is not None:
            if self.essential:
                raise before
            return
        try:
            train_workload(
                self.workload,
                with_weights(self.config),
                self.folder,
                on_step=_noting(note),
                probes=(*diagnostics_probes(self.config, self.folder), *self.probes(data)),
                show_progress=False,
            )
        except DivergedError:
            if self.essential:
                raise


@dataclass(frozen=True)
class MeasureStage(Stage):
    """Measure the run in `folder` once; `frame` is the file's name among its evaluations."""

    folder: Path
    frame: ClassVar[str]

    def is_done(self) -> bool:
        """Whether the measurements are there."""
        return self._store.path(self.frame).is_file()

    def run(self, data: Any, note: Note) -> None:
        """Measure, unless it was done."""
        self._store.once(self.frame, lambda: self.measured(data, note))

    @abstractmethod
    def measured(self, data: Any, note: Note) -> pl.DataFrame:
        """The measurements."""

    @property
    def _store(self) -> MeasurementStore:
        return MeasurementStore(self.folder / EVALUATIONS)


def divergence(run: Path) -> DivergedError | None:
    """How the training in `run` diverged; None when it did not."""
    status = read_status(run)
    if status is None or status.state != "diverged":
        return None
    return DivergedError(status.step, status.where, status.checkpoint)


def with_weights(config: Config) -> Config:
    """The configuration with the weights that its start holds by now."""
    planned = config.continued if isinstance(config, TrainingConfig | MaskedConfig) else None
    if planned is None or planned.weights != UNKNOWN:
        return config
    weights = Continuation.of(Path(planned.start)).weights
    return config.model_copy(update={"continued": planned.model_copy(update={"weights": weights})})


def _noting(note: Note) -> Callable[[StepReport], None]:
    def step(report: StepReport) -> None:
        rate = f"{report.tokens_per_second:,.0f} tokens/s"
        note(report.step, report.steps, f"loss {report.loss:.3f}, {rate}")

    return step
