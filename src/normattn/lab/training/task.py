"""What the loop trains: a model, batches that are functions of the step, and a loss."""

from __future__ import annotations

from collections.abc import Mapping
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
        ...

    @property
    def tokens_per_step(self) -> int:
        """Targets in the global batch, for the rates shown."""
        ...

    def batch(self, step: int, shard: int, shards: int, /) -> Any:
        """Shard `shard` of `shards` of the global batch of `step` (from 1), on the CPU."""
        ...

    def loss(self, batch: Any, /) -> tuple[Tensor, Mapping[str, Tensor]]:
        """The mean loss () of a batch on the model's device, and other () means to log."""
        ...
