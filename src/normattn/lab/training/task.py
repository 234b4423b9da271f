"""What the loop trains, what it tells others, and the seeds of its draws."""

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
    """A model with its data and loss; the loop knows nothing else about it.

    `batch` must be stateless: the same arguments give the same tensors, and the shards of a step
    make up the global batch in equal parts, whatever their number. A batch is a tensor or a
    (named) tuple of tensors.
    """

    @property
    def model(self) -> nn.Module:
        """The module that is trained and checkpointed."""

    @property
    def tokens_per_step(self) -> int:
        """Targets in the global batch, for the rates shown."""

    def batch(self, step: int, shard: int, shards: int, /) -> Any:
        """Shard `shard` of `shards` of the global batch of `step` (from 1), on the CPU."""

    def loss(self, batch: Any, /) -> tuple[Tensor, Mapping[str, Tensor]]:
        """The mean loss () of a batch on the model's device, and other () means to log."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """One finished step: `step` of `steps`, its means over the global batch, and the pace so far.

    `tokens` counts all targets since step 1; `seconds` and `tokens_per_second` cover this process
    only, since it began or resumed.
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
    """Something that looks into a training at chosen steps and leaves a line in RUN/`name`.jsonl.

    Lines hold no clock times, so that a run that was stopped leaves the same ones. In a distributed
    run the first process alone looks.
    """

    name: str

    def due(self, step: int, steps: int) -> bool:
        """Whether to look at `step` of `steps`."""

    def around(
        self, task: Task, step: int
    ) -> AbstractContextManager[Callable[[], Mapping[str, Any]]]:
        """Entered before the step and left after it; gives what reads the line, asked after it."""


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from `parts`, e.g. (seed, step, micro, rank); other parts, other seed."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
