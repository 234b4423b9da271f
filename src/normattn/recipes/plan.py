"""What a sweep will cost, before it costs it."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from normattn.models.accounting import flops_per_token, parameter_count
from normattn.recipes.jobs import FINISHED, Job, run_jobs
from normattn.recipes.keynorm import CellConfig, Sweep
from normattn.recipes.layout import CellPaths, write_if_changed
from normattn.recipes.measuring import set_lengths
from normattn.runs import read_status

BYTES = 4
CHECKPOINTS = 2
# Children load their libraries and the corpus before the first step.
START_SECONDS = 4.0


@dataclass(frozen=True)
class Plan:
    """The size of a sweep; `rows` count the table's rows, tokens and FLOPs those still to do."""

    runs: int
    finished: int
    rows: int
    parameters: int
    tokens_per_run: int
    scored_per_run: int
    flops: float
    disk_bytes: int

    def lines(self) -> list[tuple[str, str]]:
        """Name and value of each fact, to be printed."""
        done = f", {self.finished} of them trained already" if self.finished else ""
        return [
            ("rows of the table", f"{self.rows}"),
            ("training runs", f"{self.runs}{done}"),
            ("parameters of a model", f"{self.parameters:,}"),
            ("training tokens", f"{self.tokens_per_run:,} a run"),
            ("scored tokens", f"up to {self.scored_per_run:,} a run"),
            ("floating-point operations", f"{self.flops:.2g} still to do"),
            ("disk", f"about {_size(self.disk_bytes)}"),
        ]


@dataclass(frozen=True)
class Rates:
    """Seconds per trained and per scored token of one child among `jobs`."""

    train: float
    score: float
    jobs: int


def make_plan(sweep: Sweep) -> Plan:
    """Count runs, tokens, FLOPs and bytes of a sweep; needs no data and no measurement."""
    config = sweep.cells[0].training_config
    finished = [cell for cell in sweep.cells if is_trained(sweep.out, cell)]
    training = tokens_per_run(sweep.cells[0])
    scoring = scored_tokens(sweep.cells[0])
    parameters = parameter_count(config.model)
    trained = flops_per_token(config.model, config.model.train_length).training * training
    scored = sum(
        flops_per_token(config.model, length * config.model.train_length).forward
        * length
        * config.model.train_length
        * sweep.cells[0].evaluation.max_windows
        * len(sweep.cells[0].methods)
        for length in set_lengths(sweep.config.evaluation)
    )
    moments = 2 if config.optimiser.name == "adamw" else 1
    weights = BYTES * parameters
    return Plan(
        runs=len(sweep.cells),
        finished=len(finished),
        rows=len({(cell.variant, m) for cell in sweep.cells for m in cell.methods}),
        parameters=parameters,
        tokens_per_run=training,
        scored_per_run=scoring,
        flops=(len(sweep.cells) - len(finished)) * trained + len(sweep.cells) * scored,
        disk_bytes=len(sweep.cells) * weights * (1 + CHECKPOINTS * (1 + moments)),
    )


def tokens_per_run(cell: CellConfig) -> int:
    """Targets that the training of a cell sees."""
    config = cell.training_config
    return config.steps * config.batch_size * config.model.train_length


def scored_tokens(cell: CellConfig) -> int:
    """Tokens that pass through the model while a cell is evaluated, at most."""
    units = sum(set_lengths(cell.evaluation)) * len(cell.methods) * cell.evaluation.max_windows
    return units * cell.training_config.model.train_length


def is_trained(out: Path, cell: CellConfig) -> bool:
    """Whether the cell's training has ended, in a model or in NaN."""
    status = read_status(CellPaths.of(out, cell.variant, cell.seed).run)
    return status is not None and status.state in ("finished", "diverged")


def measure(cells: Sequence[CellConfig], jobs: int) -> Rates | None:
    """Time a few steps in as many children at once as the sweep will run; None where that fails.

    The children share the machine as they will later, so that the estimate is honest.
    """
    with tempfile.TemporaryDirectory(prefix="normattn-measure-") as place:
        paths = [CellPaths.of(Path(place), "measure", n) for n in range(min(jobs, len(cells)))]
        for path, cell in zip(paths, cells, strict=False):
            write_if_changed(path.settings, cell.model_dump(mode="json"))
        command = (sys.executable, "-m", "normattn", "_measure")
        work = [
            Job("measurement", (*command, str(path.job), str(os.getpid())), path.log)
            for path in paths
        ]
        outcomes = run_jobs(work, len(work))
        if any(outcome.code != FINISHED for outcome in outcomes):
            return None
        found = [json.loads(path.log.read_text().splitlines()[-1]) for path in paths]
    return Rates(_mean(found, "train"), _mean(found, "score"), len(paths))


def estimate(sweep: Sweep, rates: Rates, jobs: int) -> float:
    """Seconds until the table, by `rates`; what is trained already costs nothing again."""
    cells = [cell_seconds(sweep, cell, rates) for cell in sweep.cells]
    return max(sum(cells) / min(jobs, len(cells)), max(cells))


def cell_seconds(sweep: Sweep, cell: CellConfig, rates: Rates) -> float:
    """Seconds that a cell takes in its child."""
    training = 0.0 if is_trained(sweep.out, cell) else tokens_per_run(cell) * rates.train
    return START_SECONDS + training + scored_tokens(cell) * rates.score


def duration(seconds: float) -> str:
    """Seconds as people say them."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def _mean(found: Sequence[Mapping[str, float]], key: str) -> float:
    return sum(item[key] for item in found) / len(found)


def _size(count: int) -> str:
    for unit, scale in (("kB", 10**3), ("MB", 10**6)):
        if count < 1000 * scale:
            return f"{count / scale:.0f} {unit}"
    return f"{count / 10**9:.1f} GB"
