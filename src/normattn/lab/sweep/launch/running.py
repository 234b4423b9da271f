"""Jobs under any launcher: watched to their end, and stopped in order by a signal."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from normattn.errors import Interrupted
from normattn.lab.sweep.launch.seam import Job, Launcher, Needs, Outcome, Session
from normattn.stopping import HandledElsewhere

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
