"""wandb: files in RUN/wandb, sent later with `wandb sync RUN/wandb/offline-run-*`.

Nothing leaves the machine unless the environment says so: WANDB_MODE=online, after `wandb login`.
WANDB_PROJECT and WANDB_ENTITY name another project.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from normattn.lab.training.trackers.tracker import TrackedRun


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
