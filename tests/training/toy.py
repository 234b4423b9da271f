"""A tiny task with everything that makes resuming hard: dropout, momentum, a running statistic."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from normattn.lab.runs import RunDirectory
from normattn.lab.training.config import CHANGEABLE, AdamWConfig, LoopConfig, ScheduleConfig
from normattn.lab.training.distributed import World
from normattn.lab.training.loop import train
from normattn.lab.training.task import Task, TrainingResult

VOCABULARY = 16
ROWS = 8


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.feed_forward = nn.Linear(dim, dim)
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.dropout(torch.tanh(self.feed_forward(self.norm(x))))
        return x + y


class ToyModel(nn.Module):
    """Predicts the next token from the last one; the head is tied to the embedding."""

    def __init__(self, dropout: float = 0.0, dim: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(2))
        self.head = nn.Linear(dim, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        for module in self.modules():
            if isinstance(module, nn.Dropout):
                module.p = dropout

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(x)
        return y


class ToyTask:
    def __init__(self, world: World, dropout: float = 0.0) -> None:
        self.model: nn.Module = ToyModel(dropout).to(world.device)
        self.device = world.device

    @property
    def tokens_per_step(self) -> int:
        return ROWS * 8

    def batch(self, step: int, share: int, shares: int) -> Tensor:
        rows = np.random.default_rng([7, step]).integers(0, VOCABULARY, (ROWS, 9))
        rows[:, 1::2] = (rows[:, :-1:2] * 3 + 1) % VOCABULARY
        each = ROWS // shares
        return torch.from_numpy(rows[share * each : (share + 1) * each])

    def loss(self, batch: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
        logits = self.model(batch[:, :-1]).flatten(0, 1)
        targets = batch[:, 1:].flatten()
        loss = nn.functional.cross_entropy(logits.float(), targets)
        return loss, {"accuracy": (logits.argmax(-1) == targets).float().mean()}


def config(**changes: object) -> LoopConfig:
    values: dict[str, object] = {
        "steps": 30,
        "device": "cpu",
        "optimiser": AdamWConfig(lr=1e-2),
        "schedule": ScheduleConfig(warmup_steps=5),
    }
    return LoopConfig.model_validate({**values, **changes})


def open_run(path: Path, settings: LoopConfig) -> RunDirectory:
    return RunDirectory.open(path, settings, "toy", changeable=CHANGEABLE)


def run(
    path: Path,
    stop: int | None = None,
    task: Callable[[World], Task] = ToyTask,
    given: Mapping[str, Any] | None = None,
    **changes: object,
) -> TrainingResult:
    """Train the toy, with `given` to the loop; asked to stop after `stop` steps, it is."""
    settings, asked = config(**changes), itertools.count(1)
    return train(
        task,
        settings,
        open_run(path, settings),
        show_progress=False,
        should_stop=lambda: next(asked) == stop,
        **(given or {}),
    )
