"""What a sweep will cost, before it costs it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from normattn.lab.report.table import span
from normattn.lab.sweep.cell import child_arguments, write_cell
from normattn.lab.sweep.launch.running import run_jobs
from normattn.lab.sweep.launch.seam import FINISHED, Job, Launcher, Needs
from normattn.lab.sweep.layout import CellPaths
from normattn.lab.sweep.stages import Stage, TrainStage
from normattn.lab.sweep.study import Cell, Study, Sweep
from normattn.lab.training.cost import Cost

BYTES = 4
CHECKPOINTS = 2
# Children load their libraries and the corpus before the first step.
START_SECONDS = 4.0


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
class Rates:
    """Seconds per trained and per scored token of one child among `jobs`.

    `flops` are those of one trained token then: a longer sequence costs more by its own. `fp32` is
    `train` in fp32, measured of a training under bf16 on a CPU, else None.
    """

    train: float
    score: float
    flops: float
    jobs: int
    fp32: float | None = None

    def seconds(self, stage: Stage, cost: Cost) -> float:
        """What a stage of this cost takes when nothing of it is done."""
        if isinstance(stage, TrainStage):
            return cost.flops / self.flops * self.train
        return cost.scored * self.score


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
        if cell.name in sweep.taken and not paths.run.exists():
            yield [replace(like[0], trained=True), *like[1:]]
        elif paths.run.exists() or paths.continued.exists():
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


def is_trained(sweep: Sweep, cell: Cell) -> bool:
    """Whether every training of the cell has ended, in a model or in NaN."""
    trainings = [s for s in sweep.stages(cell) if isinstance(s, TrainStage)]
    return all(s.is_done() for s in trainings[cell.name in sweep.taken :])


def measure(
    study: Study, cells: Sequence[Cell], launcher: Launcher, jobs: int, needs: Needs
) -> Rates | None:
    """Time a few steps in as many children at once as the sweep will run; None where that fails.

    The children share the machine as they will later, so that the estimate is honest.
    """
    with tempfile.TemporaryDirectory(prefix="normattn-measure-") as folder:
        paths = [CellPaths.of(Path(folder), "measure", n) for n in range(min(jobs, len(cells)))]
        for path, cell in zip(paths, cells, strict=False):
            write_cell(path.settings, study, cell)
        work = [
            Job("measurement", child_arguments("_measure", path.job, study), path.log)
            for path in paths
        ]
        outcomes = run_jobs(work, launcher, len(work), needs)
        if any(outcome.code != FINISHED for outcome in outcomes):
            return None
        timings = [json.loads(path.log.read_text().splitlines()[-1]) for path in paths]
    cost = cells[0].workload.cost(cells[0].training_config)
    flops = cost.flops / cost.trained
    fp32 = _mean(timings, "fp32") if all("fp32" in one for one in timings) else None
    return Rates(_mean(timings, "train"), _mean(timings, "score"), flops, len(paths), fp32)


def estimate(sweep: Sweep, rates: Rates, jobs: int) -> float:
    """Seconds until the table, by `rates`; what is trained already costs nothing again."""
    cells = [
        START_SECONDS + sum(rates.seconds(w.stage, w.cost) for w in works if not w.trained)
        for works in work_of(sweep)
    ]
    return max(sum(cells) / min(jobs, len(cells)), max(cells))


def stage_shares(sweep: Sweep, cell: Cell, rates: Rates | None) -> list[float]:
    """What part of the cell's time each of its stages takes (by FLOPs if unmeasured)."""
    costs = [(stage, stage.cost) for stage in sweep.stages(cell)]
    parts = [cost.flops if rates is None else rates.seconds(stage, cost) for stage, cost in costs]
    return [part / sum(parts) for part in parts]


def duration(seconds: float) -> str:
    """Seconds as people say them."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def _mean(timings: Sequence[Mapping[str, float]], key: str) -> float:
    return sum(item[key] for item in timings) / len(timings)


def _size(count: int) -> str:
    for unit, scale in (("kB", 10**3), ("MB", 10**6)):
        if count < 1000 * scale:
            return f"{count / scale:.0f} {unit}"
    return f"{count / 10**9:.1f} GB"
