"""Trackers: where the curves of a training can be watched and compared (the extra `track`).

TensorBoard writes event files in RUN/tensorboard, seen with `tensorboard --logdir RUN`. trackio
keeps a database on this machine, seen with `trackio show --project normattn`; the environment says
where else (TRACKIO_DIR, TRACKIO_SPACE_ID, TRACKIO_SERVER_URL), and TRACKIO_PROJECT names another
project. wandb writes files in RUN/wandb, sent later with `wandb sync RUN/wandb/offline-run-*`:
nothing leaves the machine unless the environment says WANDB_MODE=online, after `wandb login`;
WANDB_PROJECT and WANDB_ENTITY name another project.
"""

from __future__ import annotations

import os
import re
import secrets
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from normattn.errors import InputError
from normattn.io import read_object, write_json
from normattn.lab.runs import RunDirectory
from normattn.lab.training.reports import StepReport
from normattn.terminal import warn

TrackerName = Literal["tensorboard", "trackio", "wandb"]


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is told of a run: its directory, its settings, its name (of no other run)."""

    path: Path
    config: Mapping[str, Any]
    name: str


@runtime_checkable
class Tracker(Protocol):
    """A place that takes numbers by step. Made without arguments; any method may fail."""

    def begin(self, run: TrackedRun, done: int) -> None:
        """Open the run, or go on with it after `done` steps."""
        ...

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Take the values of a step; a step that it has already stays as it is."""
        ...

    def end(self) -> None:
        """Write everything out."""
        ...


class TensorBoard:
    """Scalars; what an interrupted run wrote past its last checkpoint is hidden on resume."""

    def __init__(self) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        self._make: Any = SummaryWriter
        self._writer: Any = None

    def begin(self, run: TrackedRun, done: int) -> None:
        """Open an event file that follows on step `done`."""
        self._writer = self._make(str(run.path / "tensorboard"), purge_step=done + 1)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Add the scalars of a step."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def end(self) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()


class Trackio:
    """One run of a project, found again by its name."""

    def __init__(self) -> None:
        import trackio

        self._trackio: Any = trackio
        self._run: Any = None
        self._next = 0

    def begin(self, run: TrackedRun, done: int) -> None:
        """Make the run, or go on with the one of this name."""
        self._run = self._trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", "normattn"),
            name=run.name,
            config=dict(run.config),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        # Steps since the last checkpoint are taken once more, with the same values; the database
        # would hold them twice. The run knows, but has no public name for it.
        self._next = getattr(self._run, "_next_step", 0)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Add the values of a step that the run has not."""
        if step >= self._next:
            self._run.log(dict(values), step=step)

    def end(self) -> None:
        """Wait until the database has everything."""
        if self._run is not None:
            self._trackio.finish()


class WandB:
    """One run, found again by its id; wandb itself drops a step that the run has already."""

    def __init__(self) -> None:
        import wandb

        self._wandb: Any = wandb
        self._run: Any = None

    def begin(self, run: TrackedRun, done: int) -> None:
        """Make the run, or go on with the one of this id."""
        self._run = self._wandb.init(
            project=os.environ.get("WANDB_PROJECT", "normattn"),
            id=run.name,
            name=run.name,
            config=dict(run.config),
            dir=str(run.path),
            resume="allow",
            mode=os.environ.get("WANDB_MODE", "offline"),
            # It would take our stdout and stderr for its own log, and speak on them.
            settings=self._wandb.Settings(console="off", silent=True),
        )

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Add the values of a step."""
        self._run.log(dict(values), step=step)

    def end(self) -> None:
        """Wait until everything is written, or sent."""
        if self._run is not None:
            self._run.finish()


TRACKERS: Mapping[TrackerName, type[Tracker]] = {
    "tensorboard": TensorBoard,
    "trackio": Trackio,
    "wandb": WandB,
}


class Tracking:
    """Gives loss, metrics, gradient norm, learning rate and pace to a tracker every `every` steps.

    A run that is resumed goes on in the tracker under the name it has in RUN/tracker.json. What
    the tracker prints goes to stderr. Where it fails, one line on stderr says so and the training
    goes on without it.

    Raises `InputError` when the tracker's package cannot be loaded.
    """

    def __init__(self, tracker: TrackerName, run: RunDirectory, every: int = 1) -> None:
        self._name = tracker
        self._tracker: Tracker | None = _loaded(tracker)
        self._run = run
        self._every = every

    def start(self, done: int, steps: int) -> None:
        """Open the run in the tracker, or go on with it."""
        self._ask(lambda tracker: tracker.begin(_tracked(self._run), done), f"after step {done}")

    def step(self, report: StepReport) -> None:
        """Give the values of this step, where it is due."""
        if report.step % self._every and report.step != report.steps:
            return
        values = {
            "loss": report.loss,
            "gradient_norm": report.gradient_norm,
            "learning_rate": report.learning_rate,
            "tokens_per_second": report.tokens_per_second,
            **report.metrics,
        }
        named = {f"train/{name}": float(value) for name, value in values.items()}
        self._ask(lambda tracker: tracker.log(named, report.step), f"at step {report.step}")

    def stop(self) -> None:
        """Have everything written out."""
        self._ask(lambda tracker: tracker.end(), "at the end")

    def _ask(self, request: Callable[[Tracker], None], when: str) -> None:
        if self._tracker is None:
            return
        try:
            with redirect_stdout(sys.stderr):
                request(self._tracker)
        # A tracker is another's program with a disk and a network: whatever it raises ends it only.
        except Exception as error:
            self._tracker = None
            said = " ".join(str(error).split()) or type(error).__name__
            warn(
                f"warning: the tracker {self._name} failed {when} ({said:.200}); the training "
                "goes on without it"
            )


def _loaded(name: TrackerName) -> Tracker:
    """The tracker of this name, which loads its package when it is made."""
    try:
        return TRACKERS[name]()
    except ImportError as error:
        raise InputError(
            f"the tracker {name} cannot be loaded ({error}): `pip install 'normattn[track]'` "
            "brings it, or train without --track"
        ) from error


def _tracked(run: RunDirectory) -> TrackedRun:
    """The run as a tracker sees it; its name is drawn once and kept in RUN/tracker.json."""
    file = run.path / "tracker.json"
    if not file.exists():
        folders = "-".join(run.path.resolve().parts[-2:])
        name = re.sub(r"[^\w.-]+", "-", folders).strip("-")[:100]
        write_json(file, {"name": f"{name}-{secrets.token_hex(4)}"})
    return TrackedRun(run.path, run.config, str(read_object(file)["name"]))
