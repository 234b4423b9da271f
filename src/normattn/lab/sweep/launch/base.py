"""Jobs and who runs them: what a launcher has to do, and jobs watched to their end.

A job reads and writes files only: its settings, its log, how far it is. So whoever starts it may
be on another host, as long as both see the same folders.
"""

from __future__ import annotations

import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import ClassVar

from normattn.errors import Interrupted
from normattn.stopping import HandledElsewhere
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


GRACE_SECONDS = 60.0

Observe = Callable[[Sequence[Job], Sequence[Outcome]], None]


@dataclass
class StopRequest:
    """Whether a signal asked this process to stop; a second one asks to stop at once."""

    count: int = 0
    name: str = ""

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Take note of a signal (the signature is that of a signal handler)."""
        self.count += 1
        self.name = signal.Signals(number).name


@contextmanager
def stop_signals() -> Iterator[StopRequest]:
    """Collect SIGINT, SIGTERM and SIGHUP instead of dying of them; the old handlers come back."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    kinds = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {kind: signal.signal(kind, request.handle) for kind in kinds}
    try:
        with HandledElsewhere():
            yield request
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


def run_jobs(
    jobs: Sequence[Job],
    launcher: Launcher,
    at_once: int,
    needs: Needs | None = None,
    observe: Observe = lambda running, ended: None,
) -> list[Outcome]:
    """Run `jobs` in order, `at_once` at a time; `observe(running, ended)` is called all the while.

    A job that fails does not stop the others. On a signal the jobs at work are told to stop (they
    save their state), and `Interrupted` is raised when the last one has; a second signal kills
    them at once.
    """
    if not jobs:
        return []
    ended: list[Outcome] = []
    # The handlers come last: a scheduler's library may put its own in place when it is opened.
    with launcher.session(jobs, at_once, needs or Needs()) as session, stop_signals() as stop:
        try:
            while session.unfinished() and not stop.count:
                running, ended = session.look()
                observe(running, ended)
                time.sleep(session.poll_seconds)
            left = session.unfinished()
            if stop.count:
                _stop_all(session, stop)
        finally:
            session.kill()
    if stop.count:
        raise Interrupted(
            f"stopped by {stop.name} with {left} of {len(jobs)} jobs unfinished; "
            "their state is saved; rerun the command to resume"
        )
    return ended


def _stop_all(session: Session, stop: StopRequest) -> None:
    """Ask every job to stop, and wait until all have; force is used when patience ends."""
    session.stop()
    deadline = time.monotonic() + GRACE_SECONDS
    while not session.stopped():
        if stop.count > 1 or time.monotonic() > deadline:
            session.kill()
            return
        time.sleep(0.05)
