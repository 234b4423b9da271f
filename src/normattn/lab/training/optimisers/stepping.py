"""What torch asks of a step, around what an optimiser of ours does in it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import overload

import torch


class Stepping(torch.optim.Optimizer):
    """An optimiser whose step is `update`."""

    @abstractmethod
    def update(self) -> None:
        """Move every parameter that has a gradient."""

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update, after `closure` has made the gradients, whose loss is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.update()
        return loss
