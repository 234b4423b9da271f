"""Dropout off for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

from torch import nn


@runtime_checkable
class HasModules(Protocol):
    """A module, or what a module is asked of as `NextTokens` and the like."""

    def modules(self) -> Iterator[nn.Module]:
        """All modules within, itself the first."""
        ...


@contextmanager
def without_dropout(model: HasModules) -> Iterator[None]:
    """Evaluation mode for a while; each module then has its own mode again."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
