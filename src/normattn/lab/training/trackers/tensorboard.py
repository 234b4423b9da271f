"""TensorBoard: event files in RUN/tensorboard, seen with `tensorboard --logdir RUN`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from normattn.lab.training.trackers.tracker import TrackedRun


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
