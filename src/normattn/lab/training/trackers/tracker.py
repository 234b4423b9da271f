"""What a tracker is, and what it is told of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is told of a run: its directory, its settings, its name (of no other run)."""

    path: Path
    config: Mapping[str, Any]
    name: str


@runtime_checkable
class Tracker(Protocol):
    """A place that takes numbers by step. Made without arguments; any method may fail."""

    def begin(self, run: TrackedRun, done: int) -> None:
        """Open the run, or go on with it after `done` steps."""
        ...

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Take the values of a step; a step that it has already stays as it is."""
        ...

    def end(self) -> None:
        """Write everything out."""
        ...
