"""What a sweep will cost, before it costs it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from normattn.lab.report.table import span
from normattn.lab.sweep.layout import CellPaths
from normattn.lab.sweep.stages import Stage, TrainStage
from normattn.lab.sweep.study import Cell, Sweep
from normattn.lab.training.planning import Cost

BYTES = 4
CHECKPOINTS = 2
SLOW, FAST = 2e9, 4e10
"""Operations a second of one CPU core, from an old one at small models to a new one at large."""


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
            ("rows of the table", f"{self.rows}"),
            ("training runs", f"{self.runs}{done}"),
            ("parameters of a model", span(self.parameters)),
            ("training tokens", f"{self.trained_tokens:,} in all"),
            ("scored tokens", f"up to {self.scored_tokens:,} in all"),
            ("floating-point operations", f"{self.flops:.2g} still to do"),
            ("disk", f"about {_size(self.disk_bytes)}"),
        ]


@dataclass(frozen=True)
class Work:
    """A stage of a cell: what the whole of it costs, and whether it is a training that ended."""

    stage: Stage
    cost: Cost
    trained: bool


def work_of(sweep: Sweep) -> Iterator[list[Work]]:
    """The stages of each cell; needs no data and no measurement.

    The seeds of a variant cost the same, and a cell without results has trained nothing: its
    settings are those of another seed, which need not be checked a thousand times.
    """
    typical: dict[str, list[Work]] = {}
    for cell in sweep.cells:
        paths = CellPaths.of(sweep.out, cell.variant, cell.seed)
        if cell.variant not in typical:
            stages = cell.stages(paths)
            typical[cell.variant] = [Work(stage, stage.cost, False) for stage in stages]
        like = typical[cell.variant]
        if paths.run.exists() or paths.continued.exists():
            yield [
                Work(stage, work.cost, isinstance(stage, TrainStage) and stage.is_done())
                for stage, work in zip(cell.stages(paths), like, strict=True)
            ]
        else:
            yield like


def make_plan(sweep: Sweep) -> Plan:
    """Count runs, tokens, FLOPs and bytes of a sweep; needs no data and no measurement."""
    works = [work for cell in work_of(sweep) for work in cell]
    trainings = [work for work in works if isinstance(work.stage, TrainStage)]
    return Plan(
        runs=len(trainings),
        finished=sum(work.trained for work in trainings),
        rows=sum({cell.variant: cell.readings for cell in sweep.cells}.values()),
        parameters=tuple(sorted({work.cost.parameters for work in trainings})),
        trained_tokens=sum(work.cost.trained for work in works),
        scored_tokens=sum(work.cost.scored for work in works),
        flops=sum(work.cost.flops for work in works if not work.trained),
        disk_bytes=sum(_kept(work.stage) * BYTES * work.cost.parameters for work in trainings),
    )


def _kept(stage: Stage) -> int:
    """How many copies of its numbers a training leaves: models, checkpoints with moments."""
    assert isinstance(stage, TrainStage)
    return 1 + len(stage.config.keep) + CHECKPOINTS * (1 + stage.config.optimiser.moments)


def time_range(flops: float, jobs: int, threads: int) -> str:
    """From how long to how long so many operations take on CPU cores, in words."""
    fast, slow = (flops / (speed * jobs * threads) for speed in (FAST, SLOW))
    return f"{duration(fast)} to {duration(slow)} with {jobs} job{'s' * (jobs > 1)}"


def stage_shares(sweep: Sweep, cell: Cell) -> list[float]:
    """What part of the cell's operations each of its stages takes."""
    parts = [stage.cost.flops for stage in sweep.stages(cell)]
    return [part / sum(parts) for part in parts]


def duration(seconds: float) -> str:
    """Seconds as people say them."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def _size(count: int) -> str:
    for unit, scale in (("kB", 10**3), ("MB", 10**6)):
        if count < 1000 * scale:
            return f"{count / scale:.0f} {unit}"
    return f"{count / 10**9:.1f} GB"
