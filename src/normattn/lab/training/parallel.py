"""What the processes of one training share: the batch alone (`ddp`), or the weights as well."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from normattn.lab.runs import Checkpoint, Checkpoints
from normattn.lab.training.distribution import World
from normattn.lab.training.state import all_finite


class Parallel:
    """How a model lies on the processes, and how its state is written and read there.

    This one leaves the whole model and optimiser with each process (`ddp`, or one process).
    `searched`: whether a forward pass can be repeated outside the wrapper, module by module.
    Every method is called by all processes together.
    """

    searched = True

    def __init__(self, world: World) -> None:
        self._world = world

    @property
    def writes(self) -> bool:
        """Whether this process takes part in writing a checkpoint."""
        return self._world.main

    def wrap(self, objective: nn.Module) -> nn.Module:
        """A module whose backward pass leaves the mean of the processes' gradients."""
        return DistributedDataParallel(objective) if self._world.size > 1 else objective

    def unsynchronised(self, wrapped: nn.Module) -> AbstractContextManager[object]:
        """For micro-batches before the step's last one: gradients are exchanged once a step."""
        return wrapped.no_sync() if isinstance(wrapped, DistributedDataParallel) else nullcontext()

    def average(self) -> None:
        """Exchange the gradients that the wrapper leaves out."""

    def whole(self, value: Tensor) -> Tensor:
        """A value computed from parameters or gradients, in one piece on every process."""
        return value

    def due(self, asked: Callable[[], bool]) -> bool:
        """Whether to save now, by what the main process answers."""
        return self.writes and asked()

    def finite(self, model: nn.Module) -> bool:
        """Whether every parameter holds finite numbers only."""
        return all_finite(model)

    def save(
        self,
        checkpoints: Checkpoints,
        step: int,
        tensors: Mapping[str, Tensor],
        meta: Mapping[str, Any],
    ) -> None:
        """Write a checkpoint, or begin to; the tensors may change as soon as this returns."""
        checkpoints.save(step, tensors, meta)

    def settle(self) -> None:
        """Wait until what `save` began is in its place; `InputError` where it cannot be."""

    def load(self, checkpoint: Checkpoint, model: nn.Module) -> Mapping[str, Tensor]:
        """The tensors of a checkpoint, whoever wrote it, each as this process holds it."""
        if not checkpoint.sharded:
            return checkpoint.tensors
        from normattn.lab.training.shards import read_shards

        return read_shards(checkpoint, model)

    def gathered(self, model: nn.Module) -> AbstractContextManager[object]:
        """Within it, the main process holds every parameter of `model` whole."""
        return nullcontext()
