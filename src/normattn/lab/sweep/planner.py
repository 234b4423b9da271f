"""What a sweep will cost, before it costs it, and how far it is."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.filesize import decimal
from rich.progress import TaskID, TextColumn, TimeRemainingColumn

from normattn.lab.report.tables import span
from normattn.lab.report.terminal import Bar
from normattn.lab.sweep.launchers import DIVERGED, Job, Outcome
from normattn.lab.sweep.paths import peek
from normattn.lab.sweep.run import Run, Stage, Sweep
from normattn.lab.training.planning import Cost

BYTES = 4
CHECKPOINTS = 2
SLOW, FAST = 1e10, 8e10
"""Operations a second of one CPU core, from a busy one with tiny models to a fast one."""
ALIKE = 1.25
"""Times of a smaller ratio are given as one."""
START_SECONDS = 5.0
"""A process imports torch and reads its data before it trains."""


@dataclass(frozen=True)
class Plan:
    """The size of a sweep; `rows` count the table's rows, FLOPs those still to do."""

    runs: int
    finished: int
    rows: int
    parameters: tuple[int, ...]
    trained_tokens: int
    scored_tokens: int
    flops: float
    disk_bytes: int

    def lines(self) -> list[tuple[str, str]]:
        """Name and value of each fact, to be printed."""
        done = f", {self.finished} of them trained already" if self.finished else ""
        return [
            ("configurations", f"{self.rows}"),
            ("training runs", f"{self.runs}{done}"),
            ("parameters of a model", span(self.parameters)),
            ("training tokens", f"{self.trained_tokens:,} in all"),
            ("scored tokens", f"up to {self.scored_tokens:,} in all"),
            ("floating-point operations", f"{self.flops:.2g} still to do"),
            ("disk", f"about {decimal(self.disk_bytes)}"),
        ]


def make_plan(sweep: Sweep) -> Plan:
    """Count runs, tokens, FLOPs and bytes of a sweep; needs no data and no measurement."""

    def copies(config: Any) -> int:
        """How many numbers a training leaves for each parameter: models, checkpoints, moments."""
        return int(1 + len(config.keep) + CHECKPOINTS * (1 + config.optimiser.moments))

    stages = [stage for run in _costs(sweep) for stage in run]
    trainings = [(stage, cost, done) for stage, cost, done in stages if stage.trains is not None]
    return Plan(
        runs=len(trainings),
        finished=sum(done for *_, done in trainings),
        rows=sum({run.variant: run.readings for run in sweep.runs}.values()),
        parameters=tuple(sorted({cost.parameters for _, cost, _ in trainings})),
        trained_tokens=sum(cost.trained for _, cost, _ in stages),
        scored_tokens=sum(cost.scored for _, cost, _ in stages),
        flops=sum(cost.flops for _, cost, done in stages if not done),
        disk_bytes=sum(BYTES * cost.parameters * copies(s.trains) for s, cost, _ in trainings),
    )


def _costs(sweep: Sweep) -> Iterator[list[tuple[Stage, Cost, bool]]]:
    """The stages of each run: what each costs, and whether it is a training that ended.

    The seeds of a variant cost the same, and a run without results has trained nothing: its
    settings are those of another seed, which need not be checked a thousand times.
    """
    typical: dict[str, list[tuple[Stage, Cost, bool]]] = {}
    for run in sweep.runs:
        paths = sweep.paths(run)
        if run.variant not in typical:
            typical[run.variant] = [(stage, stage.cost(), False) for stage in sweep.stages(run)]
        like = typical[run.variant]
        if paths.run.exists() or paths.continued.exists():
            yield [
                (stage, cost, stage.trains is not None and stage.is_done())
                for stage, (_, cost, _) in zip(sweep.stages(run), like, strict=True)
            ]
        else:
            yield like


def time_range(plan: Plan, jobs: int, threads: int) -> str:
    """The time of a plan on CPU cores as text; each run is a process to start."""
    start = plan.runs * START_SECONDS / jobs
    fast, slow = (start + plan.flops / (speed * jobs * threads) for speed in (FAST, SLOW))
    alike = slow < ALIKE * fast
    span = f"about {duration(slow)}" if alike else f"{duration(fast)} to {duration(slow)}"
    return f"{span} with {jobs} job{'s' * (jobs > 1)}"


def stage_shares(sweep: Sweep, run: Run) -> list[float]:
    """What part of the run's operations each of its stages takes."""
    parts = [stage.cost().flops for stage in sweep.stages(run)]
    return [part / sum(parts) for part in parts]


def duration(seconds: float) -> str:
    """Seconds as people say them."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


class SweepProgress(Bar):
    """Shows the whole sweep and each active run; it is the `observe` of `run_jobs`.

    `shares` has the part of each job's time that each of its stages takes; `rows` returns the lines
    of the table that an ended job gave.
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
        self._whole = self.progress.add_task("all runs", total=len(jobs), text="")
        self._shown: dict[str, TaskID] = {}
        self._ended = 0
        self._began = time.monotonic()

    def __call__(self, running: Sequence[Job], ended: Sequence[Outcome]) -> None:
        """Read the notes of the active children, and report those that have ended."""
        parts = [self._look(job) for job in running]
        self.progress.update(self._whole, completed=len(ended) + sum(parts))
        for outcome in ended[self._ended :]:
            self._tell(outcome)

    def _look(self, job: Job) -> float:
        """The share of an active job that is done."""
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

    def _tell(self, outcome: Outcome) -> None:
        """How a job ended, its rows, and how long the others take at the pace so far."""
        if outcome.job.name in self._shown:
            self.progress.remove_task(self._shown.pop(outcome.job.name))
        self._ended += 1
        left = len(self._jobs) - self._ended
        seconds = (time.monotonic() - self._began) / self._ended * left
        count = f"({self._ended} of {len(self._jobs)})"
        count += f", about {duration(seconds)} left" if left else ""
        said = f"done in {duration(outcome.seconds)}"
        if outcome.code:
            word = "diverged" if outcome.code == DIVERGED else "failed"
            said = f"{word}: {outcome.message.removeprefix('normattn: ')}"
        self.say(f"{outcome.job.name} {said} {count}")
        if outcome.code == 0:
            for line in self._rows(outcome.job.name):
                self.say(line)
