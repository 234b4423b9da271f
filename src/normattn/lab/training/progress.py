"""Training progress on stderr: a bar on a terminal, else lines."""

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
    """Shows loss, tokens per second and time left: a bar on a terminal, else a line per 30 s."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(file=sys.stderr)
        self._progress: Progress | None = None
        self._shown = 0.0
        self._start_step = 0

    def start(self, step: int, steps: int) -> None:
        """Show the bar at `step` of `steps`."""
        self._start_step, self._shown = step, time.monotonic()
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
            self._progress.add_task("training", total=steps, completed=step, loss="–", rate="–")

    def step(self, report: StepReport) -> None:
        """Move the bar, a few times a second at most, or print a line."""
        now, bar = time.monotonic(), self._progress
        last = bar is not None and report.step == report.steps
        if now - self._shown < (_LINE_SECONDS if bar is None else _REDRAW_SECONDS) and not last:
            return
        self._shown = now
        loss, rate = f"{report.loss:.4f}", f"{report.tokens_per_second:,.0f}"
        if bar is not None:
            task = bar.task_ids[0]
            bar.update(task, completed=report.step, loss=loss, rate=rate, refresh=True)
            return
        left = report.seconds / (report.step - self._start_step) * (report.steps - report.step)
        self._console.print(
            f"step {report.step:,} of {report.steps:,}, loss {loss}, {rate} tokens/s, "
            f"{timedelta(seconds=round(left))} left",
            highlight=False,
            soft_wrap=True,
        )

    def stop(self) -> None:
        """Stop the bar; its last state stays on the terminal."""
        if self._progress is not None:
            self._progress.stop()
