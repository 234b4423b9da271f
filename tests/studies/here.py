"""Cells one after another in the process that asks for them: Python and torch start once for all.

That a cell is a process of its own, with a log, signals and an end, is tested with real ones: the
kills and failures of test_sweep.py, test_jobs.py and test_launchers.py.
`main` is `normattn WORDS…`, on request with such cells, and without drawing.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stderr, redirect_stdout

import pytest

from normattn import __main__
from normattn.cli import app
from normattn.lab.sweep.launchers import FINISHED, Job, Local, Needs, Start, Task
from undrawn import undraw


class Ended(Task):
    """A job that is run to its end before it counts as started."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.ended = run(job)

    def done(self) -> bool:
        return True

    def result(self) -> tuple[int, str]:
        return self.ended

    def stop(self) -> None:
        pass

    kill = stop


def run(job: Job) -> tuple[int, str]:
    """What `Child` does, without a child: the command, its output in the log, how it ended."""
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
    if code == FINISHED:
        return code, ""
    return code, job.log.read_text().splitlines()[-1].removeprefix("normattn: ")


def session(self: Local, jobs: Sequence[Job], needs: Needs) -> AbstractContextManager[Start]:
    return nullcontext(lambda jobs: [*map(Ended, jobs)])


def main(cells_here: bool = True) -> None:
    with pytest.MonkeyPatch.context() as patch:
        undraw(patch)
        if cells_here:
            patch.setattr(Local, "session", session)
        __main__.main()
