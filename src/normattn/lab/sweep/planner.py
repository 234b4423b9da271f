"""Plan the cost of a sweep, and show its progress."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.filesize import decimal
from rich.progress import TaskID, TextColumn, TimeRemainingColumn

from normattn.lab.report.tables import format_range
from normattn.lab.report.terminal import ProgressBar
from normattn.lab.sweep.launchers import DIVERGED, Job, Outcome
from normattn.lab.sweep.paths import read_or_empty
from normattn.lab.sweep.run import Run, Stage, Sweep
from normattn.lab.training.planning import Cost

BYTES = 4
CHECKPOINTS = 2
SLOW, FAST = 1e10, 8e10
"""FLOPs per second of a CPU core: a busy one with tiny models, and a fast one."""
SAME_RATIO = 1.25
"""Times within this ratio are shown as one number."""
START_SECONDS = 5.0
"""The time for a process to import torch and load its data."""


@dataclass(frozen=True)
class Plan:
    """The size of a sweep; `flops` are those that remain."""

    runs: int
    finished: int
    parameters: tuple[int, ...]
    trained_tokens: int
    scored_tokens: int
    flops: float
    disk_bytes: int

    def lines(self) -> list[tuple[str, str]]:
        """The name and value of each fact to print."""
        done = f", {self.finished} of them trained already" if self.finished else ""
        return [
            ("training runs", f"{self.runs}{done}"),
            ("parameters of a model", format_range(self.parameters)),
            ("training tokens", f"{self.trained_tokens:,} in all"),
            ("scored tokens", f"up to {self.scored_tokens:,} in all"),
            ("floating-point operations", f"{self.flops:.2g} still to do"),
            ("disk", f"about {decimal(self.disk_bytes)}"),
        ]


def make_plan(sweep: Sweep) -> Plan:
    """Count the runs, tokens, FLOPs and bytes of a sweep, without data and measurements."""

    def copies(config: Any) -> int:
        """Numbers saved for each parameter: models, checkpoints, moments."""
        return int(1 + len(config.keep) + CHECKPOINTS * (1 + config.optimiser.moments))

    stages = [stage for run in _costs(sweep) for stage in run]
    trainings = [(stage, cost, done) for stage, cost, done in stages if stage.trains is not None]
    return Plan(
        runs=len(trainings),
        finished=sum(done for *_, done in trainings),
        parameters=tuple(sorted({cost.parameters for _, cost, _ in trainings})),
        trained_tokens=sum(cost.trained for _, cost, _ in stages),
        scored_tokens=sum(cost.scored for _, cost, _ in stages),
        flops=sum(cost.flops for _, cost, done in stages if not done),
        disk_bytes=sum(BYTES * cost.parameters * copies(s.trains) for s, cost, _ in trainings),
    )


def _costs(sweep: Sweep) -> Iterator[list[tuple[Stage, Cost, bool]]]:
    """The stages of each run, with their cost and whether it is a finished training.

    All seeds of a variant cost the same.
    """
    costs: dict[str, list[Cost]] = {}
    for run in sweep.runs:
        stages = sweep.stages(run)
        if run.variant not in costs:
            costs[run.variant] = [stage.cost() for stage in stages]
        yield [
            (stage, cost, stage.trains is not None and stage.is_done())
            for stage, cost in zip(stages, costs[run.variant], strict=True)
        ]


def time_range(plan: Plan, jobs: int, threads: int) -> str:
    """The estimated time of a plan on CPU cores, as text."""
    start = plan.runs * START_SECONDS / jobs
    fast, slow = (start + plan.flops / (speed * jobs * threads) for speed in (FAST, SLOW))
    same = slow < SAME_RATIO * fast
    time = f"about {duration(slow)}" if same else f"{duration(fast)} to {duration(slow)}"
    return f"{time} with {jobs} job{'s' * (jobs > 1)}"


def stage_shares(sweep: Sweep, run: Run) -> list[float]:
    """The share of the run's FLOPs in each of its stages."""
    flops = [stage.cost().flops for stage in sweep.stages(run)]
    return [part / sum(flops) for part in flops]


def duration(seconds: float) -> str:
    """Seconds as text, in s, min or h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


class SweepProgress(ProgressBar):
    """A progress bar of the sweep and of each active run: the `observe` of `run_jobs`.

    `shares` has the share of each stage of a job (`stage_shares`), by the job's name. `rows`
    returns the table lines of a finished job.
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
        self._total = self.progress.add_task("all runs", total=len(jobs), text="")
        self._bars: dict[str, TaskID] = {}
        self._resumed_at: dict[str, float] = {}
        self._ended = 0
        self._started = time.monotonic()

    def __call__(self, running: Sequence[Job], ended: Sequence[Outcome]) -> None:
        """Update the bars of the running jobs, and report those that have ended."""
        completed = len(ended) + sum(self._update(job) for job in running)
        self.progress.update(self._total, completed=completed)
        for outcome in ended[self._ended :]:
            self._report(outcome, completed)

    def _update(self, job: Job) -> float:
        """Update the bar of a running job; return the fraction that is done."""
        if job.name not in self._bars:
            self._bars[job.name] = self.progress.add_task(job.name, total=1.0, text="starting")
        state = read_or_empty(job.log.with_name("progress.json"))
        if not state:
            return 0.0
        shares, stage = self._shares[job.name], state["stage"]
        fraction = sum(shares[:stage]) + shares[stage] * state["done"] / max(1, state["total"])
        text = f"{state['phase']} {state['done']}/{state['total']} {state['text']}"
        if state["host"] != platform.node():
            text += f" on {state['host']}"
        self.progress.update(self._bars[job.name], completed=fraction, text=text)
        self._resumed_at.setdefault(job.name, fraction)
        return float(fraction)

    def _report(self, outcome: Outcome, completed: float) -> None:
        if outcome.job.name in self._bars:
            self.progress.remove_task(self._bars.pop(outcome.job.name))
        self._ended += 1
        count = f"({self._ended} of {len(self._jobs)})"
        remaining, here = len(self._jobs) - completed, completed - sum(self._resumed_at.values())
        if remaining and here > 0:
            seconds = (time.monotonic() - self._started) / here * remaining
            count += f", about {duration(seconds)} left"
        result = f"done in {duration(outcome.seconds)}"
        if outcome.code:
            word = "diverged" if outcome.code == DIVERGED else "failed"
            result = f"{word}: {outcome.message}"
        self.print_line(f"{outcome.job.name} {result} {count}")
        if outcome.code == 0:
            for line in self._rows(outcome.job.name):
                self.print_line(line)
