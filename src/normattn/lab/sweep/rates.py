"""How long a step and an evaluated token take here: a few seconds of the real thing, in a child."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from normattn.lab.sweep.cell import read_cell
from normattn.lab.sweep.layout import CellPaths
from normattn.lab.sweep.study import Cell, Study
from normattn.lab.training.distribution import choose_device, world
from normattn.lab.training.step import Stepper
from normattn.stopping import stop_with_parent

SECONDS = 1.5


def measure_cell(job: Path, study: Study, parent: int = 0) -> None:
    """Time training and scoring of the cell in `job`; print two rates as JSON.

    `{"train": …, "score": …}`, both in seconds per token: forward, backward and optimiser, and
    scoring without gradients; `"fp32"`, the same training in fp32, of one under bf16 on a CPU. A
    causal model reads random tokens; any other cell its own batches, and its scoring counts as a
    third of its training.
    """
    if parent:
        stop_with_parent(parent)
    cell = read_cell(CellPaths.of_job(job).settings, study)
    print(json.dumps(rates(cell)))


def rates(cell: Cell) -> dict[str, float]:
    """Seconds per token of this cell: `train` and `score`, and `fp32` where that may be less."""
    torch.set_num_threads(cell.training_config.threads)
    train, score, in_fp32 = _train_seconds(cell), cell.score_seconds(), _in_fp32(cell)
    measured = {"train": train, "score": train / 3 if score is None else score}
    return measured if in_fp32 is None else {**measured, "fp32": _train_seconds(in_fp32)}


def _in_fp32(cell: Cell) -> Cell | None:
    """The cell in fp32, of one under bf16 on a CPU: not every processor is faster in bf16."""
    config = cell.training_config
    if config.precision == "fp32" or choose_device(config.device).type != "cpu":
        return None
    # What a training goes on from is a training's settings, too.
    settings: dict[str, Any] = cell.model_dump(include={"training", "start"})
    changed = {name: {**own, "precision": "fp32"} for name, own in settings.items() if own}
    return cell.model_copy(update=changed)


def _train_seconds(cell: Cell) -> float:
    own = cell.train_seconds()
    return _step_seconds(cell) if own is None else own


def _step_seconds(cell: Cell) -> float:
    """Seconds per token of a training step on the cell's own batches."""
    config = cell.training_config
    with world(config.device) as group:
        task = cell.workload.task(config, cell.prepare(), group.device, config.accumulate)
        stepper = Stepper(task, config, group, lambda: False)
        seconds = _per_step(stepper.step, config.steps)
        stepper.close()
    return seconds / task.tokens_per_step


def _per_step(step: Callable[[int], object], most: int) -> float:
    """Seconds per step of `step(number)`, of at most `most` if that is more than two.

    The first, which also makes what the others find ready, counts only where it alone takes longer
    than the measurement may.
    """
    started = time.perf_counter()
    step(1)
    first = time.perf_counter() - started
    if first >= SECONDS:
        return first
    steps, spent, started = 0, 0.0, time.perf_counter()
    while not steps or (spent < SECONDS and steps + 1 < most):
        steps += 1
        step(steps + 1)
        spent = time.perf_counter() - started
    return spent / steps
