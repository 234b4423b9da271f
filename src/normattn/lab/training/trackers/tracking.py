"""One training followed by one tracker, which may fail without ending it."""

from __future__ import annotations

import re
import secrets
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from typing import Literal

from normattn.atomic import write_json
from normattn.errors import InputError
from normattn.lab.runs import RunDirectory
from normattn.lab.training.reports import StepReport
from normattn.lab.training.trackers.tensorboard import TensorBoard
from normattn.lab.training.trackers.tracker import TrackedRun, Tracker
from normattn.lab.training.trackers.trackio import Trackio
from normattn.lab.training.trackers.wandb import WandB
from normattn.structured import read_object
from normattn.terminal import warn

TrackerName = Literal["tensorboard", "trackio", "wandb"]
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
