"""How far a sweep is: a bar on a terminal, a line and the finished rows as each cell ends."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from rich.progress import TaskID, TextColumn, TimeRemainingColumn

from normattn.lab.report.table import NOTHING
from normattn.lab.report.terminal import Bar
from normattn.lab.report.view import View
from normattn.lab.stats import collected
from normattn.lab.stats.arrays import on_common_sets
from normattn.lab.sweep.launchers import DIVERGED, Job, Outcome
from normattn.lab.sweep.layout import CellPaths, peek
from normattn.lab.sweep.plan import duration
from normattn.lab.sweep.study import Cell, Study, Sweep


def headlines(study: Study, sweep: Sweep, cell: Cell) -> list[str]:
    """What the study's `headline` columns say of one cell: a line for each of its rows.

    "  KNA-YaRN: train length 31.2, change −2.1". These are values of this cell's seed alone,
    without intervals; the page at the end has those.
    """
    if not study.headline:
        return []
    run = CellPaths.of(sweep.out, cell.variant, cell.seed).run
    view = View(on_common_sets(collected(run), ()))
    table = study.page.tables[0]
    columns = table.columns(view) if callable(table.columns) else table.columns
    shown = [replace(column, interval=False) for column in columns if column.key in study.headline]
    lines = []
    for row in table.rows(view):
        cells = [(column.title, column.cell(view, row)) for column in shown]
        said = [f"{title} {made.text}" for title, made in cells if made is not NOTHING]
        lines.append(f"  {row.label}: {', '.join(said)}")
    return lines


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
