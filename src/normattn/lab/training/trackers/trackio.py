"""trackio: a database on this machine, seen with `trackio show --project normattn`.

The environment says where else: TRACKIO_DIR (a folder), TRACKIO_SPACE_ID, TRACKIO_SERVER_URL;
TRACKIO_PROJECT names another project.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from normattn.lab.training.trackers.tracker import TrackedRun


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
