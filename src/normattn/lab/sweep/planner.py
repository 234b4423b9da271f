"""Plan the cost of a sweep, and show its progress."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich.filesize import decimal
from rich.progress import TaskID, TextColumn, TimeRemainingColumn

from normattn.lab.report.tables import format_range
from normattn.lab.report.terminal import ProgressBar
from normattn.lab.sweep.launchers import DIVERGED, Job, Outcome
from normattn.lab.sweep.paths import read_or_empty
from normattn.lab.sweep.run import Sweep
from normattn.lab.training import LoopConfig
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
    """The size of a sweep: its trainings, the FLOPs that remain, and facts to print."""

    runs: int
    finished: int
    flops: float
    facts: dict[str, str]


def make_plan(sweep: Sweep) -> Plan:
    """Count the runs, tokens, FLOPs and bytes of a sweep, without data and measurements."""
    costs: dict[str, list[Cost]] = {}  # All seeds of a variant cost the same.
    stages: list[tuple[Cost, LoopConfig | None, bool]] = []
    for run in sweep.runs:
        of_run = sweep.stages(run)
        costs[run.variant] = costs.get(run.variant) or [stage.cost() for stage in of_run]
        for stage, cost in zip(of_run, costs[run.variant], strict=True):
            stages.append((cost, stage.trains, stage.trains is not None and stage.is_done()))
    trainings = [(cost, config, done) for cost, config, done in stages if config is not None]
    finished = sum(done for *_, done in trainings)
    flops = sum(cost.flops for cost, _, done in stages if not done)
    # Numbers saved for each parameter: models, checkpoints with the optimiser's moments.
    numbers = sum(
        cost.parameters * int(1 + len(config.keep) + CHECKPOINTS * (1 + config.optimiser.moments))
        for cost, config, _ in trainings
    )
    already = f", {finished} of them trained already" if finished else ""
    facts = {
        "training runs": f"{len(trainings)}{already}",
        "parameters of a model": format_range(sorted({cost.parameters for cost, *_ in trainings})),
        "training tokens": f"{sum(cost.trained for cost, *_ in stages):,} in all",
        "scored tokens": f"up to {sum(cost.scored for cost, *_ in stages):,} in all",
        "floating-point operations": f"{flops:.2g} still to do",
        "disk": f"about {decimal(BYTES * numbers)}",
    }
    return Plan(len(trainings), finished, flops, facts)


def time_range(plan: Plan, jobs: int, threads: int) -> str:
    """The estimated time of a plan on CPU cores, as text."""
    start = plan.runs * START_SECONDS / jobs
    fast, slow = (start + plan.flops / (speed * jobs * threads) for speed in (FAST, SLOW))
    same = slow < SAME_RATIO * fast
    time = f"about {duration(slow)}" if same else f"{duration(fast)} to {duration(slow)}"
    return f"{time} with {jobs} job{'s' * (jobs > 1)}"


def duration(seconds: float) -> str:
    """Seconds as text, in s, min or h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


class SweepProgress(ProgressBar):
    """A progress bar of the sweep and of each active run: the `observe` of `run_jobs`.

    `shares` has the share of each stage in a job's FLOPs, by the job's name. `rows` returns the
    table lines of a finished job.
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
        completed = float(len(ended))
        for job in running:
            if job.name not in self._bars:
                self._bars[job.name] = self.progress.add_task(job.name, total=1.0, text="starting")
            state = read_or_empty(job.log.with_name("progress.json"))
            if not state:
                continue
            shares, stage = self._shares[job.name], state["stage"]
            done = sum(shares[:stage]) + shares[stage] * state["done"] / max(1, state["total"])
            text = f"{state['phase']} {state['done']}/{state['total']} {state['text']}"
            if state["host"] != platform.node():
                text += f" on {state['host']}"
            self.progress.update(self._bars[job.name], completed=done, text=text)
            self._resumed_at.setdefault(job.name, done)
            completed += done
        self.progress.update(self._total, completed=completed)
        for outcome in ended[self._ended :]:
            self._report(outcome, completed)

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
