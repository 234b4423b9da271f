"""How long a step and an evaluated token take here: a few seconds of the real thing, in a child."""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch

from normattn.sweep.cell import Find, read_cell
from normattn.sweep.jobs import watch_parent
from normattn.sweep.layout import CellPaths
from normattn.sweep.study import Cell
from normattn.training.distribution import world
from normattn.training.step import Stepper

SECONDS = 1.5


def measure_cell(job: Path, find: Find, parent: int = 0) -> None:
    """Time training and scoring of the cell in `job` on random tokens; print two rates as JSON.

    `{"train": …, "score": …}`, both in seconds per token: forward, backward and optimiser, and
    scoring without gradients.
    """
    if parent:
        watch_parent(parent)
    print(json.dumps(rates(read_cell(CellPaths.of_job(job).settings, find))))


def rates(cell: Cell) -> dict[str, float]:
    """Seconds per token of this cell: `train` and `score`."""
    torch.set_num_threads(cell.training_config.threads)
    own = cell.rates()
    if own is not None:
        return own
    train = _step_seconds(cell)
    # Scoring is a forward pass: a third of a step's work.
    return {"train": train, "score": train / 3}


def _step_seconds(cell: Cell) -> float:
    """Seconds per token of a training step on the cell's own batches."""
    config = cell.training_config
    with world(config.device) as place:
        task = cell.workload.task(config, cell.prepare(), place.device, config.accumulate)
        stepper = Stepper(task, config, place, lambda: False)
        steps, started, spent = 0, 0.0, 0.0
        while steps < 2 or (spent < SECONDS and steps < config.steps):
            steps += 1
            stepper.step(steps)
            # The first step also makes what the others find ready.
            started = time.perf_counter() if steps == 1 else started
            spent = time.perf_counter() - started
        stepper.close()
    return spent / (steps - 1) / task.tokens_per_step
