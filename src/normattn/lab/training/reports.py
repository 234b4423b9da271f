"""What a training loop tells others: a report per step, callbacks, a result at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from normattn.lab.training.task import Task


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
class Callback(Protocol):
    """Something that follows a training: a progress bar, a tracker."""

    def start(self, done: int, steps: int) -> None:
        """Training begins after `done` of `steps` steps."""
        ...

    def step(self, report: StepReport) -> None:
        """A step is done."""
        ...

    def stop(self) -> None:
        """Training ended, for whatever reason."""
        ...


@runtime_checkable
class Probe(Protocol):
    """Something that looks into a training at chosen steps and leaves a line in RUN/`name`.jsonl.

    Lines hold no clock times, so that a run that was stopped leaves the same ones. In a distributed
    run the first process alone looks.
    """

    name: str

    def due(self, step: int, steps: int) -> bool:
        """Whether to look at `step` of `steps`."""
        ...

    def around(
        self, task: Task, step: int
    ) -> AbstractContextManager[Callable[[], Mapping[str, Any]]]:
        """Entered before the step and left after it; gives what reads the line, asked after it."""
        ...
