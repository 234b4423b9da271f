"""Trackers: where the curves of a training can be watched and compared (the extra `track`).

TensorBoard writes event files in RUN/tensorboard, seen with `tensorboard --logdir RUN`. trackio
keeps a database on this machine, seen with `trackio show --project normattn`; the environment says
where else (TRACKIO_DIR, TRACKIO_SPACE_ID, TRACKIO_SERVER_URL), and TRACKIO_PROJECT names another
project. wandb writes files in RUN/wandb, sent later with `wandb sync RUN/wandb/offline-run-*`:
nothing leaves the machine unless the environment says WANDB_MODE=online, after `wandb login`;
WANDB_PROJECT and WANDB_ENTITY name another project.
"""

from __future__ import annotations

import importlib
import os
import re
import secrets
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from typing import Any, Literal

from normattn.errors import InputError
from normattn.io import read_object, write_json
from normattn.lab.runs import RunDirectory
from normattn.lab.training.task import StepReport
from normattn.terminal import warn

TrackerName = Literal["tensorboard", "trackio", "wandb"]
Opened = tuple[Callable[[Mapping[str, float], int], object], Callable[[], object]]
"""What takes the values of a step, and what writes everything out at the end."""


def open_tensorboard(package: Any, run: RunDirectory, done: int) -> Opened:
    """Scalars; what an interrupted run wrote past its last checkpoint is hidden on resume."""
    writer = package.SummaryWriter(str(run.path / "tensorboard"), purge_step=done + 1)

    def log(values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return log, writer.close


def open_trackio(package: Any, run: RunDirectory, done: int) -> Opened:
    """One run of a project, found again by its name."""
    opened = package.init(
        project=os.environ.get("TRACKIO_PROJECT", "normattn"),
        name=_name_of(run),
        config=dict(run.config),
        resume="allow",
        embed=False,
        auto_log_gpu=False,
        auto_log_cpu=False,
    )
    # Steps since the last checkpoint are taken once more, with the same values; the database
    # would hold them twice. The run knows, but has no public name for it.
    first = getattr(opened, "_next_step", 0)

    def log(values: Mapping[str, float], step: int) -> None:
        if step >= first:
            opened.log(dict(values), step=step)

    return log, package.finish


def open_wandb(package: Any, run: RunDirectory, done: int) -> Opened:
    """One run, found again by its id; wandb itself drops a step that the run has already."""
    name = _name_of(run)
    opened = package.init(
        project=os.environ.get("WANDB_PROJECT", "normattn"),
        id=name,
        name=name,
        config=dict(run.config),
        dir=str(run.path),
        resume="allow",
        mode=os.environ.get("WANDB_MODE", "offline"),
        # It would take our stdout and stderr for its own log, and speak on them.
        settings=package.Settings(console="off", silent=True),
    )
    return lambda values, step: opened.log(dict(values), step=step), opened.finish


TRACKERS: Mapping[TrackerName, tuple[str, Callable[[Any, RunDirectory, int], Opened]]] = {
    "tensorboard": ("torch.utils.tensorboard.writer", open_tensorboard),
    "trackio": ("trackio", open_trackio),
    "wandb": ("wandb", open_wandb),
}
"""The package of each, and what opens a run in it, or goes on with it after so many steps."""


class Tracking:
    """Gives loss, metrics, gradient norm, learning rate and pace to a tracker every `every` steps.

    A run that is resumed goes on in the tracker under the name it has in RUN/tracker.json. What
    the tracker prints goes to stderr. Where it fails, one line on stderr says so and the training
    goes on without it. Raises `InputError` when the tracker's package cannot be loaded.
    """

    def __init__(self, tracker: TrackerName, run: RunDirectory, every: int = 1) -> None:
        self._name, self._run, self._every = tracker, run, every
        self._opened: Opened | None = None
        package, self._open = TRACKERS[tracker]
        try:
            self._package = importlib.import_module(package)
        except ImportError as error:
            raise InputError(
                f"the tracker {tracker} cannot be loaded ({error}): `pip install "
                "'normattn[track]'`, or train without --track"
            ) from error

    def start(self, done: int, steps: int) -> None:
        """Open the run in the tracker, or go on with it."""

        def open_run() -> None:
            self._opened = self._open(self._package, self._run, done)

        self._try(open_run, f"after step {done}")

    def step(self, report: StepReport) -> None:
        """Give the values of this step, where it is due."""
        if self._opened is None or (report.step % self._every and report.step != report.steps):
            return
        log, _ = self._opened
        values = {
            "loss": report.loss,
            "gradient_norm": report.gradient_norm,
            "learning_rate": report.learning_rate,
            "tokens_per_second": report.tokens_per_second,
            **report.metrics,
        }
        named = {f"train/{name}": float(value) for name, value in values.items()}
        self._try(lambda: log(named, report.step), f"at step {report.step}")

    def stop(self) -> None:
        """Have everything written out."""
        if self._opened is not None:
            self._try(self._opened[1], "at the end")

    def _try(self, request: Callable[[], object], when: str) -> None:
        try:
            with redirect_stdout(sys.stderr):
                request()
        # A tracker is another's program with a disk and a network: whatever it raises ends it only.
        except Exception as error:
            self._opened = None
            reason = " ".join(str(error).split()) or type(error).__name__
            warn(
                f"warning: the tracker {self._name} failed {when} ({reason:.200}); the training "
                "goes on without it"
            )


def _name_of(run: RunDirectory) -> str:
    """The run's name in a tracker, drawn once and kept in RUN/tracker.json."""
    file = run.path / "tracker.json"
    if not file.exists():
        folders = "-".join(run.path.resolve().parts[-2:])
        name = re.sub(r"[^\w.-]+", "-", folders).strip("-")[:100]
        write_json(file, {"name": f"{name}-{secrets.token_hex(4)}"})
    return str(read_object(file)["name"])
