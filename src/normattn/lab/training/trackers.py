"""Experiment trackers: TensorBoard, trackio, wandb (the extra `track`).

- TensorBoard writes event files in RUN/tensorboard; view them with `tensorboard --logdir RUN`.
- trackio keeps a local database; view it with `trackio show --project normattn`. TRACKIO_DIR,
  TRACKIO_SPACE_ID and TRACKIO_SERVER_URL choose another place, TRACKIO_PROJECT another project.
- wandb writes files in RUN/wandb; upload them with `wandb sync RUN/wandb/offline-run-*`. Nothing
  leaves the machine unless WANDB_MODE=online is set, after `wandb login`. WANDB_PROJECT and
  WANDB_ENTITY choose another project.
"""

from __future__ import annotations

import importlib
import os
import re
import secrets
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from functools import partial
from typing import Any, Literal

from normattn.errors import InputError
from normattn.io import read_object, write_json
from normattn.lab.runs import RunDirectory
from normattn.lab.training.task import StepReport
from normattn.terminal import warn

TrackerName = Literal["tensorboard", "trackio", "wandb"]
OpenTracker = tuple[Callable[[Mapping[str, float], int], object], Callable[[], object]]
"""A function that logs the values of a step, and one that closes the tracker."""


def open_tensorboard(package: Any, run: RunDirectory, step: int) -> OpenTracker:
    """Open TensorBoard. On resume, values after the last checkpoint are hidden."""
    writer = package.SummaryWriter(str(run.path / "tensorboard"), purge_step=step + 1)

    def log(values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return log, writer.close


def open_trackio(package: Any, run: RunDirectory, step: int) -> OpenTracker:
    """Open or resume a trackio run by its name."""
    tracked = package.init(
        project=os.environ.get("TRACKIO_PROJECT", "normattn"),
        name=_tracker_name(run),
        config=dict(run.config),
        resume="allow",
        embed=False,
        auto_log_gpu=False,
        auto_log_cpu=False,
    )
    # Steps after the last checkpoint run again with the same values; skip those in the database.
    # trackio has no public name for its next step.
    first = getattr(tracked, "_next_step", 0)

    def log(values: Mapping[str, float], step: int) -> None:
        if step >= first:
            tracked.log(dict(values), step=step)

    return log, package.finish


def open_wandb(package: Any, run: RunDirectory, step: int) -> OpenTracker:
    """Open or resume a wandb run by its id. wandb drops steps that the run has already."""
    name = _tracker_name(run)
    tracked = package.init(
        project=os.environ.get("WANDB_PROJECT", "normattn"),
        id=name,
        name=name,
        config=dict(run.config),
        dir=str(run.path),
        resume="allow",
        mode=os.environ.get("WANDB_MODE", "offline"),
        # By default, wandb captures stdout and stderr, and prints to them.
        settings=package.Settings(console="off", silent=True),
    )
    return lambda values, step: tracked.log(dict(values), step=step), tracked.finish


TRACKERS: Mapping[TrackerName, tuple[str, Callable[[Any, RunDirectory, int], OpenTracker]]] = {
    "tensorboard": ("torch.utils.tensorboard.writer", open_tensorboard),
    "trackio": ("trackio", open_trackio),
    "wandb": ("wandb", open_wandb),
}
"""The package of each tracker, and the function that opens or resumes a run at a step."""


class Tracking:
    """Logs loss, metrics, gradient norm, learning rate and speed every `every` steps.

    A resumed run keeps its name in the tracker, from RUN/tracker.json. The tracker's output goes to
    stderr. If it fails, a warning is printed and training continues without it. Raises `InputError`
    if the tracker's package cannot be imported.
    """

    def __init__(self, tracker: TrackerName, run: RunDirectory, every: int = 1) -> None:
        self._name, self._run, self._every = tracker, run, every
        self._tracker: OpenTracker | None = None
        package, self._open = TRACKERS[tracker]
        try:
            self._package = importlib.import_module(package)
        except ImportError as error:
            raise InputError(
                f"the tracker {tracker} cannot be loaded ({error}): `pip install "
                "'normattn[track]'`, or train without --track"
            ) from error

    def start(self, step: int, steps: int) -> None:
        """Open or resume the run in the tracker."""
        request = partial(self._open, self._package, self._run, step)
        self._tracker = self._try(request, f"after step {step}")

    def step(self, report: StepReport) -> None:
        """Log the values of this step if it is due."""
        if self._tracker is None or (report.step % self._every and report.step != report.steps):
            return
        log, _ = self._tracker
        values = {
            "loss": report.loss,
            "gradient_norm": report.gradient_norm,
            "learning_rate": report.learning_rate,
            "tokens_per_second": report.tokens_per_second,
            **report.metrics,
        }
        scalars = {f"train/{name}": float(value) for name, value in values.items()}
        self._try(lambda: log(scalars, report.step), f"at step {report.step}")

    def stop(self) -> None:
        """Close the tracker."""
        if self._tracker is not None:
            self._try(self._tracker[1], "at the end")

    def _try(self, request: Callable[[], Any], when: str) -> Any:
        """Return the result of a request to the tracker; after an error ask it nothing more."""
        try:
            with redirect_stdout(sys.stderr):
                return request()
        # Trackers use the disk and the network: no error of theirs may stop the training.
        except Exception as error:
            self._tracker = None
            reason = " ".join(str(error).split()) or type(error).__name__
            warn(
                f"warning: the tracker {self._name} failed {when} ({reason:.200}); the training "
                "goes on without it"
            )
            return None


def _tracker_name(run: RunDirectory) -> str:
    """Return the run's name in a tracker, made once and saved in RUN/tracker.json."""
    file = run.path / "tracker.json"
    if not file.exists():
        folders = "-".join(run.path.resolve().parts[-2:])
        name = re.sub(r"[^\w.-]+", "-", folders).strip("-")[:100]
        write_json(file, {"name": f"{name}-{secrets.token_hex(4)}"})
    return str(read_object(file)["name"])
