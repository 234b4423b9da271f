"""Run jobs in parallel: the interface of a launcher, and child processes of this machine.

A job reads and writes files only: its settings, its log, its progress. So it can run on any host
that sees the same folders. `clusters` has the launchers for Ray and Slurm.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field

from normattn.errors import Interrupted
from normattn.settings import Settings
from normattn.stopping import StopRequest

FINISHED, DIVERGED = 0, 3
GRACE_SECONDS = 60.0
"""How long jobs may take to save their state before they are killed."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
PREFIX = "launcher."


@dataclass(frozen=True)
class Job:
    """One Python process: its arguments, and the file that takes its output.

    The last line of `log` explains a failure. The id of the parent process is added to the
    arguments.
    """

    name: str
    arguments: tuple[str, ...]
    log: Path


@dataclass(frozen=True)
class Outcome:
    """How a job ended: its exit code, and the last line it printed (empty on success)."""

    job: Job
    code: int
    message: str
    seconds: float

    @property
    def failed(self) -> bool:
        """Whether it neither finished nor diverged; a diverged job is a result."""
        return self.code not in (FINISHED, DIVERGED)


@dataclass(frozen=True)
class Needs:
    """What a job computes on: CPU cores, and the setting `device` (auto, cpu, cuda, cuda:N)."""

    cores: int = 1
    device: str = "cpu"


@dataclass(frozen=True, eq=False)
class Task:
    """A job that was started, and how it is asked.

    `done`: whether it has ended; `result`: its exit code, and why it failed ("" on success);
    `stop` has it save its state and end, and is repeated after `ask_again_seconds` while it goes
    on; `kill` ends it, saved or not.
    """

    job: Job
    done: Callable[[], bool]
    result: Callable[[], tuple[int, str]]
    stop: Callable[[], object]
    kill: Callable[[], object]
    ask_again_seconds: float = float("inf")
    started: float = field(default_factory=time.monotonic)


Start = Callable[[Sequence[Job]], Sequence[Task]]
"""Starts jobs, or submits them to a scheduler."""


class Launcher(Settings, ABC):
    """Where the runs of a sweep execute; its fields are the settings `launcher.NAME`.

    No result depends on it: directories and settings are the same under each launcher, and a sweep
    that began under one continues under another.
    """

    name: ClassVar[str]
    poll_seconds: ClassVar[float] = 0.1

    @abstractmethod
    def slots(self, needs: Needs) -> int | None:
        """How many jobs run at once by default; None leaves it to a scheduler's queue."""

    @abstractmethod
    def session(self, jobs: Sequence[Job], needs: Needs) -> AbstractContextManager[Start]:
        """What starts these jobs, closed when the context ends."""

    def describe(self) -> str:
        """The name, and the settings that differ from their defaults."""
        changed = self.model_dump(exclude_defaults=True)
        words = ", ".join(f"{name} {value}" for name, value in changed.items())
        return f"{self.name}: {words}" if words else self.name


def split_changes(changes: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The launcher's settings (`launcher.NAME`, by NAME), and the study's."""
    own = {k.removeprefix(PREFIX): v for k, v in changes.items() if k.startswith(PREFIX)}
    return own, {k: v for k, v in changes.items() if not k.startswith(PREFIX)}


Observe = Callable[[Sequence[Job], Sequence[Outcome]], None]


def run_jobs(
    jobs: Sequence[Job],
    launcher: Launcher,
    at_once: int,
    needs: Needs | None = None,
    observe: Observe = lambda running, ended: None,
) -> list[Outcome]:
    """Run `jobs` in order, `at_once` at a time; `observe(running, ended)` is called all the while.

    A job that fails does not stop the others. On a signal the running jobs save their state, and
    `Interrupted` is raised when the last one has ended; a second signal kills them.
    """
    waiting, running, ended = list(jobs), list[Task](), list[Outcome]()
    if not waiting:
        return ended
    # The handlers come last: a scheduler's library may install its own when a session opens.
    stop = StopRequest(insist=False)
    with launcher.session(jobs, needs or Needs()) as start, stop:
        try:
            while (waiting or running) and not stop.count:
                free = at_once - len(running)
                now, waiting = waiting[:free], waiting[free:]
                for job in now:  # What an earlier attempt printed is no sign of this one.
                    job.log.parent.mkdir(parents=True, exist_ok=True)
                    job.log.unlink(missing_ok=True)
                running += start(now) if now else []
                for task in [task for task in running if task.done()]:
                    running.remove(task)
                    seconds = time.monotonic() - task.started
                    ended.append(Outcome(task.job, *task.result(), seconds))
                observe([task.job for task in running if task.job.log.exists()], ended)
                time.sleep(launcher.poll_seconds)
            left = len(waiting) + len(running)
            if stop.count:
                _stop_all(running, stop)
        finally:
            for task in running:
                task.kill()
    if stop.count:
        raise Interrupted(
            f"stopped by {stop.by} with {left} of {len(jobs)} jobs unfinished; "
            "their state is saved; rerun the command to resume"
        )
    return ended


def _stop_all(running: Sequence[Task], stop: StopRequest) -> None:
    """Ask every task to stop, and wait until all have, or until patience ends."""
    asked, deadline = float("-inf"), time.monotonic() + GRACE_SECONDS
    while left := [task for task in running if not task.done()]:
        now = time.monotonic()
        if stop.count > 1 or now > deadline:
            return
        if now - asked >= left[0].ask_again_seconds:
            asked = now
            for task in left:
                task.stop()
        time.sleep(0.05)


class Child:
    """A job as a child process, in a process group of its own: Ctrl-C reaches the parent alone.

    `environment` is added to this process's; `folder` is the child's working directory.
    """

    def __init__(
        self, job: Job, environment: Mapping[str, str] | None = None, folder: Path | None = None
    ) -> None:
        self.job = job
        job.log.parent.mkdir(parents=True, exist_ok=True)
        # One thread each, so that results do not depend on how many jobs run.
        threads = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
        one = dict.fromkeys((*threads, "NUMEXPR_NUM_THREADS"), "1")
        with job.log.open("w") as log:
            self.process = subprocess.Popen(
                # -P: a module in the user's folder is no part of the child.
                (sys.executable, "-P", *job.arguments, str(os.getpid())),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **(environment or {}), **one, "TOKENIZERS_PARALLELISM": "false"},
                cwd=folder,
            )

    def done(self) -> bool:
        """Whether it has ended."""
        return self.process.poll() is not None

    def stop(self) -> None:
        """Ask it to save its state and end."""
        if not self.done():
            self.process.terminate()

    def kill(self) -> None:
        """End it, saved or not."""
        if not self.done():
            self.process.kill()
            self.process.wait()

    def result(self) -> tuple[int, str]:
        """Its exit code and why it failed ("" on success); waits until it has ended."""
        code = self.process.wait()
        if code == FINISHED:
            return code, ""
        text = self.job.log.read_text("utf-8", errors="replace")
        lines = [line.strip() for line in text.split("\n") if line.strip()]
        # What is printed may reach the log later than the sentence of an error.
        sentences = [line for line in lines if line.startswith("normattn: ")]
        last = (sentences or lines or ["said nothing"])[-1]
        if code > 0:
            return code, last
        name = signal.Signals(-code).name
        said = "" if last == "said nothing" else f" (it last said: {last})"
        return code, f"was stopped by {name} from outside; rerun the command to resume{said}"


class Local(Launcher):
    """Child processes on this machine.

    `devices` are the GPUs to use, as CUDA_VISIBLE_DEVICES names them (default: all that torch sees,
    where the setting `device` is auto or cuda). A job sees one GPU alone; where there are more
    jobs than GPUs, they share them evenly.
    """

    name: ClassVar[str] = "local"

    devices: Annotated[tuple[int | str, ...], Field(min_length=1)] | None = None

    def slots(self, needs: Needs) -> int:
        """A job on each GPU; on a CPU as many as the cores have threads for."""
        if needs.device.startswith("cuda:"):
            return 1  # All of them on the one that is named.
        return len(self._gpus(needs)) or max(1, cores() // needs.cores)

    @contextmanager
    def session(self, jobs: Sequence[Job], needs: Needs) -> Iterator[Start]:
        """Start child processes, each on the GPU with the fewest others."""
        gpus, children = self._gpus(needs), list[tuple[str, Child]]()

        def start(job: Job) -> Task:
            busy = Counter(gpu for gpu, child in children if not child.done())
            gpu = min(gpus, key=lambda name: busy[name], default="")
            child = Child(job, {VISIBLE: gpu} if gpu else {})
            if gpu:
                children.append((gpu, child))
            return Task(job, child.done, child.result, child.stop, child.kill)

        yield lambda jobs: [start(job) for job in jobs]

    def _gpus(self, needs: Needs) -> tuple[str, ...]:
        """The GPUs that jobs are spread over; none where jobs choose by themselves."""
        if needs.device not in ("auto", "cuda"):
            return ()
        return tuple(map(str, self.devices)) if self.devices is not None else visible_gpus()


def visible_gpus() -> tuple[str, ...]:
    """The GPUs that torch sees here, by the names that CUDA_VISIBLE_DEVICES takes."""
    import torch  # Hosts that only start children do without it.

    if not torch.cuda.is_available():
        return ()
    count = torch.cuda.device_count()
    named = [part.strip() for part in os.environ.get(VISIBLE, "").split(",") if part.strip()]
    return tuple(named[:count]) if named else tuple(str(n) for n in range(count))


def cores() -> int:
    """How many processors this process may use: fewer than there are in a scheduler's share."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
