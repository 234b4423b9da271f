"""The interfaces of the training loop: tasks, probes, step reports, seeds."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn


@runtime_checkable
class Task(Protocol):
    """A model with its batches and loss.

    `batch` must be stateless: equal arguments give equal tensors. The shards of a step are equal
    parts of the same global batch, for any number. A batch is a tensor or a (named) tuple of
    tensors.
    """

    @property
    def model(self) -> nn.Module:
        """The module that is trained and checkpointed."""

    @property
    def tokens_per_step(self) -> int:
        """Targets in the global batch, for progress and metrics."""

    def batch(self, step: int, shard: int, shards: int, /) -> Any:
        """Return shard `shard` of `shards` of the global batch of `step` (from 1), on the CPU."""

    def loss(self, batch: Any, /) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the mean loss () of a batch on the model's device, and other () means to log."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """One finished step: its means over the global batch, and the speed so far.

    `tokens` counts all targets since step 1. `seconds` and `tokens_per_second` cover only the time
    since this process started or resumed.
    """

    step: int
    steps: int
    loss: float
    gradient_norm: float
    learning_rate: float
    metrics: Mapping[str, float]
    tokens: int
    tokens_per_second: float
    seconds: float


@dataclass(frozen=True)
class TrainingResult:
    """A finished run: its directory, steps, tokens, and the last step's loss and metrics."""

    path: Path
    steps: int
    tokens: int
    loss: float
    metrics: Mapping[str, float]


@runtime_checkable
class Probe(Protocol):
    """Measures chosen training steps and writes a line for each to RUN/`name`.jsonl.

    Lines contain no clock times, so that a resumed run writes the same ones. In a distributed run
    only the first process measures.
    """

    name: str

    def due(self, step: int, steps: int) -> bool:
        """Return whether to measure `step` of `steps`."""

    def around(
        self, task: Task, step: int
    ) -> AbstractContextManager[Callable[[], Mapping[str, Any]]]:
        """Wrap the step; yields a function that returns the line, called after the step."""


def derive_seed(*parts: int | str) -> int:
    """Hash `parts`, e.g. (seed, step, shard), into a 63-bit seed."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
