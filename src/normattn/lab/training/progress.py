"""Progress on stderr: loss, tokens per second, time left. A bar on a terminal, else lines."""

from __future__ import annotations

import sys
import time
from datetime import timedelta

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from normattn.lab.training.task import StepReport
from normattn.terminal import Console

_REDRAW_SECONDS = 0.2
_LINE_SECONDS = 30.0


class ProgressBar:
    """A bar where stderr is a terminal, and a line every half minute where it is none."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(file=sys.stderr)
        self._progress: Progress | None = None
        self._drawn = 0.0
        self._done = 0

    def start(self, done: int, steps: int) -> None:
        """Draw the bar at `done` of `steps`."""
        self._done, self._drawn = done, time.monotonic()
        if self._console.is_terminal:
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
        """Move the bar, a few times a second at most, or say a line."""
        now, bar = time.monotonic(), self._progress
        last = bar is not None and report.step == report.steps
        if now - self._drawn < (_LINE_SECONDS if bar is None else _REDRAW_SECONDS) and not last:
            return
        self._drawn = now
        loss, rate = f"{report.loss:.4f}", f"{report.tokens_per_second:,.0f}"
        if bar is not None:
            task = bar.task_ids[0]
            bar.update(task, completed=report.step, loss=loss, rate=rate, refresh=True)
            return
        left = report.seconds / (report.step - self._done) * (report.steps - report.step)
        self._console.print(
            f"step {report.step:,} of {report.steps:,}, loss {loss}, {rate} tokens/s, "
            f"{timedelta(seconds=round(left))} left",
            highlight=False,
            soft_wrap=True,
        )

    def stop(self) -> None:
        """Leave the last state of the bar on the terminal."""
        if self._progress is not None:
            self._progress.stop()
