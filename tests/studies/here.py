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
from normattn.lab.sweep.launchers import FINISHED, Job, Local, Needs, Outcome, Session, Task


class OneByOne(Session):
    """Starting a job runs it to its end."""

    poll_seconds: ClassVar[float] = 0.0

    def start(self, jobs: Sequence[Job]) -> list[Task]:
        """One after another."""
        return [Task(job, run(job)) for job in jobs]

    def is_over(self, task: Task) -> bool:
        """Always."""
        return True

    def outcome(self, task: Task) -> Outcome:
        """What `run` returned."""
        assert isinstance(task.handle, Outcome)
        return task.handle

    def stop(self, tasks: Sequence[Task]) -> None:
        """Nothing runs between two looks."""

    def kill(self, tasks: Sequence[Task]) -> None:
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


def session(self: Local, jobs: Sequence[Job], needs: Needs) -> AbstractContextManager[Session]:
    """In place of `Local.session`."""
    return nullcontext(OneByOne())


def main() -> None:
    """As `normattn WORDS…`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Local, "session", session)
        __main__.main()
