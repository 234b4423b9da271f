"""A progress bar on a terminal: loss, tokens per second, time left."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from normattn.training.reports import StepReport

_REDRAW_SECONDS = 0.2


class ProgressBar:
    """A bar on stderr, drawn only where stderr is a terminal."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(file=sys.stderr)
        self._progress: Progress | None = None
        self._drawn = 0.0

    def start(self, done: int, steps: int) -> None:
        """Draw the bar at `done` of `steps`."""
        if not self._console.is_terminal:
            return
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TextColumn("{task.fields[rate]} tokens/s"),
            TimeRemainingColumn(),
            console=self._console,
            auto_refresh=False,
        )
        self._progress.start()
        self._progress.add_task("training", total=steps, completed=done, loss="–", rate="–")

    def step(self, report: StepReport) -> None:
        """Move the bar, a few times a second at most."""
        if self._progress is None:
            return
        now = time.monotonic()
        if now - self._drawn < _REDRAW_SECONDS and report.step != report.steps:
            return
        self._drawn = now
        self._progress.update(
            self._progress.task_ids[0],
            completed=report.step,
            loss=f"{report.loss:.4f}",
            rate=f"{report.tokens_per_second:,.0f}",
            refresh=True,
        )

    def stop(self) -> None:
        """Leave the last state of the bar on the terminal."""
        if self._progress is not None:
            self._progress.stop()
