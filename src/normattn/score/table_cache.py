"""The last tables that were made, kept under names and shared by threads.

A table for counted positions is made for more of them than are asked for, and cut: a sequence that
grows token by token seldom needs a new one.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor


@runtime_checkable
class Rows(Protocol):
    """A table of which some rows can be had."""

    def rows(self, rows: slice) -> Any:
        """The table of some of the positions."""
        ...


T = TypeVar("T", bound=Rows)


class TableCache(OrderedDict[tuple[object, ...], T]):
    """The last `most` tables that were made, each under a name that holds all that decides it.

    Threads share it: two that ask for the same table at once may both make it, and get equal ones.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[TableCache[T]], tuple[int]]:
        # A copy makes its tables again: it may stand on another device, or be changed.
        return TableCache, (self.most,)

    def made(self, name: tuple[object, ...], make: Callable[[], T]) -> T:
        """Return the tables of this name, made by `make` the first time."""
        with self._lock:
            if name in self:
                self.move_to_end(name)
                return self[name]
        # Ordinary tensors even when first asked for in inference mode: training reuses them.
        with torch.inference_mode(False):
            tables = make()
        with self._lock:
            self[name] = tables
            self.move_to_end(name)
            while len(self) > self.most:
                self.popitem(last=False)
        return tables

    def counted(
        self,
        name: tuple[object, ...],
        bounds: tuple[int, int],
        room: int,
        device: torch.device,
        make: Callable[[Tensor], T],
    ) -> T:
        """Return the rows within `bounds` of a table of positions 0 … room − 1."""
        whole = self.made((*name, device, room), lambda: make(torch.arange(room, device=device)))
        rows: T = whole.rows(slice(*bounds))
        return rows
