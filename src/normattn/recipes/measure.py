"""How long a step and an evaluated token take here: a few seconds of the real thing, in a child."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import torch

from normattn.models import CausalLM
from normattn.recipes.cell import read_cell
from normattn.recipes.jobs import watch_parent
from normattn.recipes.language_studies import CausalCell
from normattn.recipes.layout import CellPaths
from normattn.recipes.studies import Cell
from normattn.training.distribution import choose_device, world
from normattn.training.optimisers import make_optimiser
from normattn.training.step import Stepper

SECONDS = 1.5


def measure_cell(job: Path, parent: int = 0) -> None:
    """Time training and scoring of the cell in `job` on random tokens; print two rates as JSON.

    `{"train": …, "score": …}`, both in seconds per token: forward, backward and optimiser, and
    scoring without gradients.
    """
    if parent:
        watch_parent(parent)
    print(json.dumps(rates(read_cell(CellPaths.of_job(job).settings))))


def rates(cell: Cell) -> dict[str, float]:
    """Seconds per token of this cell: `train` and `score`."""
    torch.set_num_threads(cell.training_config.threads)
    if isinstance(cell, CausalCell):
        return _causal_rates(cell)
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


def _causal_rates(cell: CausalCell) -> dict[str, float]:
    """The same for a language model, at its training and at its longest tested length."""
    config = cell.training_config
    device = choose_device(config.device)
    model = CausalLM(config.model).to(device)
    optimiser, _ = make_optimiser(model, config.optimiser)
    length = config.model.train_length

    def ids(rows: int, tokens: int) -> torch.Tensor:
        return torch.randint(config.model.vocab_size, (rows, tokens + 1), device=device)

    def train(rows: int) -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=config.precision == "bf16"):
            loss = model.loss(ids(rows, length)).loss
        torch.autograd.backward(loss)
        optimiser.step()
        optimiser.zero_grad()
        loss.item()

    def score(rows: int) -> None:
        bf16 = cell.evaluation.precision == "bf16"
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            model.token_scores(ids(rows, longest)).loss.sum().item()

    longest = length * max(cell.evaluation.multiples)
    most = max(1, cell.evaluation.max_tokens // longest)
    return {
        "train": _per_row(train, config.batch_size) / length,
        "score": _per_row(score, min(most, cell.evaluation.max_windows)) / longest,
    }


def _per_row(work: Callable[[int], None], rows: int) -> float:
    """Seconds per row of `work(rows)`; fewer rows are taken where one alone takes long."""
    started = time.perf_counter()
    work(1)
    one = time.perf_counter() - started
    rows = max(1, min(rows, int(SECONDS / one)))
    work(rows)
    times: list[float] = []
    while not times or (sum(times) < SECONDS / 2 and len(times) < 20):
        started = time.perf_counter()
        work(rows)
        times.append(time.perf_counter() - started)
    return sorted(times)[len(times) // 2] / rows
