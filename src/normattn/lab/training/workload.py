"""A whole training from one configuration to one saved model, the same for every kind of model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch

from normattn.errors import InputError
from normattn.lab.runs import RunDirectory, read_metrics
from normattn.lab.training.continuation import KEPT
from normattn.lab.training.corpus_record import begin_corpus
from normattn.lab.training.distribution import World, world
from normattn.lab.training.loop import OnStep, train
from normattn.lab.training.loop_config import CHANGEABLE, LoopConfig
from normattn.lab.training.planning import Cost, check_memory
from normattn.lab.training.reports import Callback, Probe, TrainingResult
from normattn.lab.training.task import Task
from normattn.models.pretrained import check_weights, save_model
from normattn.terminal import warn

MODEL = "model"
Config = TypeVar("Config", bound=LoopConfig)
Data = TypeVar("Data")


class Workload(ABC, Generic[Config, Data]):
    """One kind of training: which data, which task, what is left at the end.

    `kind` names the run directories, `changeable` the settings that may differ when a run resumes.
    """

    kind: ClassVar[str]
    config_class: ClassVar[type[LoopConfig]]
    changeable: ClassVar[frozenset[str]] = CHANGEABLE

    @abstractmethod
    def prepare(self, config: Config) -> Data:
        """The data, from its cache where there is one; `InputError` for data that cannot be."""

    def look(self, config: Config) -> tuple[str, ...]:
        """What a plan says of the data before anything is done; quick, no data is prepared.

        Raises `InputError` where the data, or a library that reads it, is plainly not there.
        """
        return ()

    @abstractmethod
    def task(self, config: Config, data: Data, device: torch.device, shares: int) -> Task:
        """The task on `device`, whose batches come in `shares` parts a step."""

    def check(self, config: Config, data: Data, shares: int) -> None:
        """Raise `InputError` for what cannot be trained, before the run directory is made."""

    @abstractmethod
    def cost(self, config: Config) -> Cost:
        """What the whole training takes."""

    def export(self, task: Task, data: Data, out: Path) -> None:
        """Leave the trained model (and what reads it needs) in the run's directory."""
        save_model(task.model, out / MODEL)


def train_workload(
    workload: Workload[Any, Any],
    config: LoopConfig,
    out: Path | str,
    *,
    on_step: OnStep | None = None,
    should_stop: Callable[[], bool] | None = None,
    show_progress: bool = True,
    callbacks: Sequence[Callback] = (),
    probes: Sequence[Probe] = (),
) -> TrainingResult:
    """Train what `config` says in the run directory `out`, or resume it where it was stopped.

    At the end `out/model/` holds the trained model (config.json, model.safetensors), beside it what
    the workload leaves; `out/kept/step-N/` the models of `config.keep`. A finished run is returned
    as it is. Raises as `train` does, and `InputError` for unusable data, a directory of another run
    and a training that cannot fit into memory.
    """
    out = Path(out)
    with world(config.device) as process:
        done = process.on_main(lambda: _finished(workload, config, out))
        if done is not None:
            return done
        check_memory(workload.cost(config), config, process)
        data = workload.prepare(config)
        shares = process.size * config.accumulate
        workload.check(config, data, shares)
        run = _open(workload, config, out)

        def make_task(this_process: World) -> Task:
            # Now that the directory is this run's and locked.
            this_process.on_main(lambda: begin_corpus(data, out))
            return workload.task(config, data, this_process.device, shares)

        return train(
            make_task,
            config,
            run,
            on_step=on_step,
            should_stop=should_stop,
            callbacks=callbacks,
            probes=probes,
            show_progress=show_progress,
            export=lambda task: workload.export(task, data, out),
            export_kept=lambda task, step: save_model(task.model, kept_model(out, step)),
        )


def kept_model(run: Path, step: int) -> Path:
    """Where the run in `run` keeps its model of `step`, one of its configuration's `keep`."""
    return run / KEPT / f"step-{step:08d}"


def rows_per_share(rows: int, shares: int, name: str = "batch_size") -> int:
    """How many of `rows` each share gets; `InputError` where they do not divide."""
    if rows % shares:
        raise InputError(
            f"{name} {rows} does not divide into {shares} micro-batches (processes × accumulate)"
        )
    return rows // shares


def _open(workload: Workload[Any, Any], config: LoopConfig, out: Path) -> RunDirectory:
    return RunDirectory.open(out, config, workload.kind, changeable=workload.changeable)


def _finished(workload: Workload[Any, Any], config: LoopConfig, out: Path) -> TrainingResult | None:
    """The result of a run that is done; None where there is work left.

    A directory that cannot hold this run is refused here, before data is prepared for it.
    """
    run = _open(workload, config, out)
    if not run.begun or not _is_finished(run):
        return None
    records = read_metrics(run.metrics.path)
    if not records or not (out / MODEL).is_dir():
        raise InputError(
            f"the run in {out} is marked as finished, but its metrics.jsonl or model is gone; "
            "delete its status.json to resume from the last checkpoint"
        )
    try:
        check_weights(out / MODEL)
    except InputError as error:
        raise InputError(
            f"the run in {out} is marked as finished, but {error}; delete its status.json to "
            "resume from the last checkpoint"
        ) from error
    last = records[-1]
    known = {"step", "loss", "gradient_norm", "learning_rate", "tokens"}
    metrics = {name: value for name, value in last.items() if name not in known}
    return TrainingResult(out, last["step"], last["tokens"], last["loss"], metrics)


def _is_finished(run: RunDirectory) -> bool:
    """Whether the status says so; a damaged one says nothing, and the run resumes."""
    try:
        status = run.status
    except InputError as error:
        warn(f"warning: {error}; resuming from the last checkpoint")
        return False
    return status is not None and status.state == "finished"
