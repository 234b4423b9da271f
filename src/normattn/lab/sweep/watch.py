"""How far a sweep is, as its children note it: a bar on a terminal, a line per cell elsewhere."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping, Sequence

from rich.progress import TaskID, TextColumn, TimeRemainingColumn

from normattn.lab.report.terminal import Bar
from normattn.lab.sweep.launch.seam import DIVERGED, Job, Outcome
from normattn.lab.sweep.layout import peek
from normattn.lab.sweep.plan import duration


class SweepProgress(Bar):
    """Shows the whole sweep and each running cell; made for `run_jobs`' `observe`.

    `shares` says of each job what part of its time each of its stages takes; `rows` is asked for
    the lines of the table that an ended job gave.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        shares: Mapping[str, Sequence[float]],
        rows: Callable[[str], Sequence[str]] = lambda name: (),
    ) -> None:
        super().__init__(
            TimeRemainingColumn(), TextColumn("{task.fields[text]}"), refresh_per_second=4
        )
        self._jobs = jobs
        self._shares = shares
        self._rows = rows
        self._whole = self.progress.add_task("all cells", total=len(jobs), text="")
        self._shown: dict[str, TaskID] = {}
        self._ended = 0
        self._began = time.monotonic()

    def __call__(self, running: Sequence[Job], ended: Sequence[Outcome]) -> None:
        """Look at the notes of the running children, and tell of those that have ended."""
        parts = [self._look(job) for job in running]
        self.progress.update(self._whole, completed=len(ended) + sum(parts))
        for outcome in ended[self._ended :]:
            self._tell(outcome)

    def _look(self, job: Job) -> float:
        """The share of a running job that is done."""
        if job.name not in self._shown:
            self._shown[job.name] = self.progress.add_task(job.name, total=1.0, text="starting")
        note = peek(job.log.with_name("progress.json"))
        if not note:
            return 0.0
        done = note["done"] / max(1, note["total"])
        shares, stage = self._shares[job.name], note["stage"]
        part = sum(shares[:stage]) + shares[stage] * done
        text = f"{note['phase']} {note['done']}/{note['total']} {note['text']}"
        if note["host"] != platform.node():
            text += f" on {note['host']}"
        self.progress.update(self._shown[job.name], completed=part, text=text)
        return float(part)

    def _time_left(self) -> str:
        """How long the others take at the pace of those that have ended; "" at the end."""
        left = len(self._jobs) - self._ended
        seconds = (time.monotonic() - self._began) / self._ended * left
        return f", about {duration(seconds)} left" if left else ""

    def _tell(self, outcome: Outcome) -> None:
        if outcome.job.name in self._shown:
            self.progress.remove_task(self._shown.pop(outcome.job.name))
        self._ended += 1
        count = f"({self._ended} of {len(self._jobs)})"
        if outcome.failed:
            said = f"failed: {outcome.message.removeprefix('normattn: ')}"
        elif outcome.code == DIVERGED:
            said = f"diverged: {outcome.message.removeprefix('normattn: ')}"
        else:
            said = f"done in {duration(outcome.seconds)}"
        self.say(f"{outcome.job.name} {said} {count}{self._time_left()}")
        if outcome.code == 0:
            for line in self._rows(outcome.job.name):
                self.say(line)
