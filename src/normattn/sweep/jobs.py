"""Child processes, a few at a time: started, watched, and stopped together with their parent."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from normattn.errors import Interrupted
from normattn.stopping import HandledElsewhere

FINISHED, DIVERGED = 0, 3
GRACE_SECONDS = 60.0


@dataclass(frozen=True)
class Job:
    """One command; what it prints goes to `log`, whose last line explains a failure."""

    name: str
    command: tuple[str, ...]
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


def one_thread(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` with every numerical library held to one thread, so that jobs do not matter."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
    return {**environment, **dict.fromkeys(names, "1"), "TOKENIZERS_PARALLELISM": "false"}


def run_jobs(
    jobs: Sequence[Job],
    workers: int,
    observe: Callable[[Sequence[Job], Sequence[Outcome]], None] = lambda running, ended: None,
    poll: float = 0.1,
) -> list[Outcome]:
    """Run `jobs` in order, `workers` at a time; `observe(running, ended)` is called all the while.

    A job that fails does not stop the others. On a signal the children are told to stop (they
    save their state), and `Interrupted` is raised when the last one has; a second signal kills
    them at once.
    """
    waiting, running, ended = list(jobs), list[_Child](), list[Outcome]()
    with stop_signals() as stop:
        try:
            while (waiting or running) and not stop.count:
                while waiting and len(running) < workers:
                    running.append(_Child(waiting.pop(0)))
                for child in [child for child in running if child.done()]:
                    running.remove(child)
                    ended.append(child.outcome())
                observe([child.job for child in running], ended)
                time.sleep(poll)
            if stop.count:
                _stop_all(running, stop)
        finally:
            for child in running:
                child.kill()
    if stop.count:
        left = len(waiting) + len(running)
        raise Interrupted(
            f"stopped by {stop.name} with {left} of {len(jobs)} jobs unfinished; "
            "their state is saved; rerun the command to resume"
        )
    return ended


def _stop_all(running: Sequence[_Child], stop: StopRequest) -> None:
    """Ask every child to stop, and wait until all have; force is used when patience ends."""
    for child in running:
        child.terminate()
    deadline = time.monotonic() + GRACE_SECONDS
    while any(not child.done() for child in running):
        if stop.count > 1 or time.monotonic() > deadline:
            for child in running:
                child.kill()
        time.sleep(0.05)


class _Child:
    """A running job, in a process group of its own: a Ctrl-C reaches the parent alone."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.started = time.monotonic()
        job.log.parent.mkdir(parents=True, exist_ok=True)
        with job.log.open("w") as log:
            self.process = subprocess.Popen(
                job.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=one_thread(os.environ),
            )

    def done(self) -> bool:
        return self.process.poll() is not None

    def terminate(self) -> None:
        if not self.done():
            self.process.terminate()

    def kill(self) -> None:
        if not self.done():
            self.process.kill()
            self.process.wait()

    def outcome(self) -> Outcome:
        code = self.process.wait()
        message = "" if code == FINISHED else self._last_line()
        if code < 0:
            name = signal.Signals(-code).name
            message = f"was stopped by {name} from outside; rerun the command to resume" + (
                f" (it last said: {message})" if message else ""
            )
        return Outcome(self.job, code, message, time.monotonic() - self.started)

    def _last_line(self) -> str:
        lines = self.job.log.read_text("utf-8", errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "said nothing")


def watch_parent(parent: int, poll: float = 0.5) -> None:
    """Stop this process by SIGTERM (so that it saves its state) once `parent` is no more.

    A parent that was killed cannot tell its children; each looks for itself.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(poll)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="watch-parent", daemon=True).start()
