"""Cells one after another in the process that asks for them: Python and torch start once for all.

That a cell is a process of its own, with a log, signals and an end, is tested with real ones: the
kills and failures of test_sweep.py, test_jobs.py and test_launchers.py.
`main` is `normattn WORDS…` with such cells.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stderr, redirect_stdout
from typing import ClassVar

import pytest

from normattn import __main__
from normattn.cli import app
from normattn.lab.sweep.launch.base import FINISHED, Job, Needs, Outcome, Session
from normattn.lab.sweep.launch.local import Local


class OneByOne(Session):
    """Each look runs one job to its end."""

    poll_seconds: ClassVar[float] = 0.0

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._waiting = list(jobs)
        self._ended: list[Outcome] = []

    def look(self) -> tuple[list[Job], list[Outcome]]:
        """The next job, whole."""
        if self._waiting:
            self._ended.append(run(self._waiting.pop(0)))
        return [], self._ended

    def unfinished(self) -> int:
        """Those that wait."""
        return len(self._waiting)

    def stop(self) -> None:
        """Nothing is at work between two looks."""

    def stopped(self) -> bool:
        """Always: see `stop`."""
        return True

    def kill(self) -> None:
        """See `stop`."""


def run(job: Job) -> Outcome:
    """What `Child` does, without a child: the command, its output in the log, how it ended."""
    began = time.monotonic()
    assert job.arguments[:2] == ("-m", "normattn")
    job.log.parent.mkdir(parents=True, exist_ok=True)
    with (
        job.log.open("w") as log,
        redirect_stdout(log),
        redirect_stderr(log),
        pytest.raises(SystemExit) as ended,
    ):
        app.main(job.arguments[2:])
    code = ended.value.code
    assert isinstance(code, int)
    message = "" if code == FINISHED else job.log.read_text().splitlines()[-1]
    return Outcome(job, code, message, time.monotonic() - began)


def session(
    self: Local, jobs: Sequence[Job], at_once: int, needs: Needs
) -> AbstractContextManager[Session]:
    """In place of `Local.session`."""
    return nullcontext(OneByOne(jobs))


def main() -> None:
    """As `normattn WORDS…`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Local, "session", session)
        __main__.main()
