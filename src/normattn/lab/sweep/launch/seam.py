"""The seam between a sweep and what runs its cells: jobs, how they ended, and a launcher's duties.

A job reads and writes files only: its settings, its log, how far it is. So whoever starts it may
be on another host, as long as both see the same folders.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from normattn.structured import Settings

FINISHED, DIVERGED = 0, 3


@dataclass(frozen=True)
class Job:
    """What one Python interpreter is told; its output goes to `log`, whose last line explains a
    failure. The id of the process that starts it is added to the arguments.
    """

    name: str
    arguments: tuple[str, ...]
    log: Path


@dataclass(frozen=True)
class Outcome:
    """How a job ended: its exit code, and the last line it printed (empty when all went well)."""

    job: Job
    code: int
    message: str
    seconds: float

    @property
    def failed(self) -> bool:
        """Neither finished nor diverged; a diverged job is a result."""
        return self.code not in (FINISHED, DIVERGED)


@dataclass(frozen=True)
class Needs:
    """What a cell computes on: CPU cores, and the setting `device` (auto, cpu, cuda, cuda:N)."""

    cores: int = 1
    device: str = "cpu"


class Session(ABC):
    """The jobs of one sweep in a launcher's hands."""

    poll_seconds: ClassVar[float] = 0.1

    @abstractmethod
    def look(self) -> tuple[list[Job], list[Outcome]]:
        """Start what may start; the jobs at work now, and how those ended that have, in order."""

    @abstractmethod
    def unfinished(self) -> int:
        """How many jobs have not ended, begun or not."""

    @abstractmethod
    def stop(self) -> None:
        """Ask the jobs at work to save their state and end; those not begun never will."""

    @abstractmethod
    def stopped(self) -> bool:
        """Whether none is at work any more after `stop`."""

    @abstractmethod
    def kill(self) -> None:
        """End the jobs at work, saved or not; does nothing when there are none."""


class Launcher(Settings, ABC):
    """Where the cells of a sweep run; its fields are the settings `launcher.NAME`.

    The table does not depend on it: a cell's directories and settings are the same under each, and
    a sweep begun under one goes on under another.
    """

    name: ClassVar[str]
    here: ClassVar[bool]
    """Whether cells run on this machine, so that steps timed here say how long the sweep takes."""

    @abstractmethod
    def slots(self, needs: Needs) -> int | None:
        """How many cells run at a time unless said; None leaves it to a scheduler's queue."""

    @abstractmethod
    def session(
        self, jobs: Sequence[Job], at_once: int, needs: Needs
    ) -> AbstractContextManager[Session]:
        """Take these jobs on, `at_once` at a time; leaving the context lets go of everything."""

    @abstractmethod
    def said(self) -> str:
        """In a few words for the plan."""
