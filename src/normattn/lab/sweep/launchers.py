"""Run jobs in parallel: the interface of launchers, and child processes on this machine.

A job communicates through files only (settings, log, progress), so it can run on any host with the
same folders. The launchers for Ray and Slurm are in `clusters`.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field

from normattn.errors import InputError, Interrupted
from normattn.settings import Settings
from normattn.stopping import StopRequest

FINISHED, DIVERGED = 0, 3
GRACE_SECONDS = 60.0
"""How long jobs may take to save their state before they are killed."""
VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Job:
    """One Python process, and the file `log` of its output.

    Its last line with "normattn: " explains a failure. The parent's id is appended to `arguments`.
    """

    name: str
    arguments: tuple[str, ...]
    log: Path


@dataclass(frozen=True)
class Outcome:
    """How a job ended: its exit code, and the reason for a failure ("" on success)."""

    job: Job
    code: int
    message: str
    seconds: float


@dataclass(frozen=True)
class Needs:
    """The resources of a job: CPU cores, and the setting `device` (auto, cpu, cuda, cuda:N)."""

    cores: int = 1
    device: str = "cpu"


class Task(ABC):
    """A started job."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.started = time.monotonic()

    @abstractmethod
    def done(self) -> bool:
        """Whether it has ended."""

    @abstractmethod
    def result(self) -> tuple[int, str]:
        """The exit code, and the reason for a failure ("" on success)."""

    @abstractmethod
    def stop(self) -> None:
        """Ask it to save its state and end."""

    @abstractmethod
    def kill(self) -> None:
        """End it at once."""


Start = Callable[[Sequence[Job]], Sequence[Task]]
"""Starts jobs, or submits them to a scheduler, and returns their tasks."""


class Launcher(Settings, ABC):
    """Where the runs of a sweep execute; its fields are the settings `launcher.NAME`.

    No result depends on it, so a sweep can continue under another launcher.
    """

    name: ClassVar[str]
    poll_seconds: ClassVar[float] = 0.1
    stop_again_seconds: ClassVar[float] = float("inf")
    """After this time a running task is asked again to stop."""

    @abstractmethod
    def slots(self, needs: Needs) -> int | None:
        """How many jobs run at once by default; None leaves it to a scheduler's queue."""

    @abstractmethod
    def session(self, jobs: Sequence[Job], needs: Needs) -> AbstractContextManager[Start]:
        """A context manager that yields the function to start these jobs."""

    def describe(self) -> str:
        """The name, and the settings that differ from their defaults."""
        changed = self.model_dump(exclude_defaults=True)
        settings = ", ".join(f"{name} {value}" for name, value in changed.items())
        return f"{self.name}: {settings}" if settings else self.name


Observe = Callable[[Sequence[Job], Sequence[Outcome]], None]
"""Receives (running jobs, ended jobs)."""


def run_jobs(
    jobs: Sequence[Job],
    launcher: Launcher,
    at_once: int,
    needs: Needs | None = None,
    observe: Observe = lambda running, ended: None,
) -> list[Outcome]:
    """Run `jobs` in order, `at_once` at a time; return their outcomes.

    `observe` is called repeatedly. A failed job does not stop the others. On a signal the running
    jobs save their state, and `Interrupted` is raised after the last one. They are killed after a
    second signal or `GRACE_SECONDS`.
    """
    waiting, running, ended = list(jobs), list[Task](), list[Outcome]()
    if not waiting:
        return ended
    # `stop` is entered last: a scheduler's library may install signal handlers in `session`.
    stop = StopRequest(insist=False)
    with launcher.session(jobs, needs or Needs()) as start, stop:
        try:
            while (waiting or running) and not stop.count:
                free = at_once - len(running)
                starting, waiting = waiting[:free], waiting[free:]
                for job in starting:  # A log means that the job has started: remove older ones.
                    job.log.parent.mkdir(parents=True, exist_ok=True)
                    job.log.unlink(missing_ok=True)
                running += start(starting) if starting else []
                for task in [task for task in running if task.done()]:
                    running.remove(task)
                    seconds = time.monotonic() - task.started
                    ended.append(Outcome(task.job, *task.result(), seconds))
                observe([task.job for task in running if task.job.log.exists()], ended)
                time.sleep(launcher.poll_seconds)
            unfinished = len(waiting) + len(running)
            if stop.count:
                _stop_all(running, stop, launcher.stop_again_seconds)
        finally:
            for task in running:
                if not task.done():
                    task.kill()
    if stop.count:
        raise Interrupted(
            f"stopped by {stop.by} with {unfinished} of {len(jobs)} jobs unfinished; "
            "rerun the command to resume"
        )
    return ended


def _stop_all(running: Sequence[Task], stop: StopRequest, again: float) -> None:
    """Stop every task, and wait until all have ended, `GRACE_SECONDS` at most."""
    last_stop, deadline = float("-inf"), time.monotonic() + GRACE_SECONDS
    while unfinished := [task for task in running if not task.done()]:
        now = time.monotonic()
        if stop.count > 1 or now > deadline:
            return
        if now - last_stop >= again:
            last_stop = now
            for task in unfinished:
                task.stop()
        time.sleep(0.05)


class Child(Task):
    """A job as a child process in its own session, so that Ctrl-C reaches only the parent."""

    def __init__(
        self, job: Job, environment: Mapping[str, str] | None = None, folder: Path | None = None
    ) -> None:
        super().__init__(job)
        self.environment = dict(environment or {})
        # One thread each, so that results do not depend on the number of jobs.
        libraries = ("OMP", "MKL", "OPENBLAS", "NUMEXPR")
        threads = dict.fromkeys((f"{name}_NUM_THREADS" for name in libraries), "1")
        variables = {**self.environment, **threads, "TOKENIZERS_PARALLELISM": "false"}
        with job.log.open("w") as log:
            self.process = subprocess.Popen(
                # -P: do not import modules from the user's folder.
                (sys.executable, "-P", *job.arguments, str(os.getpid())),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **variables},
                cwd=folder,
            )

    def done(self) -> bool:
        """Whether it has ended."""
        return self.process.poll() is not None

    def stop(self) -> None:
        """Send SIGTERM."""
        self.process.terminate()

    def kill(self) -> None:
        """Send SIGKILL, and wait for the end."""
        self.process.kill()
        self.process.wait()

    def result(self) -> tuple[int, str]:
        """Wait for the end; return the exit code and the reason for a failure ("" on success)."""
        code = self.process.wait()
        if code == FINISHED:
            return code, ""
        log = self.job.log
        text = log.read_text("utf-8", errors="replace") if log.exists() else ""
        lines = [line.strip() for line in text.split("\n") if line.strip()]
        # Other output may reach the log after the error's sentence.
        sentences = [line for line in lines if line.startswith("normattn: ")]
        last = (sentences or lines or [""])[-1].removeprefix("normattn: ")
        if code > 0:
            return code, last or "no output"
        name = signal.Signals(-code).name
        output = f" (its last output: {last})" if last else ""
        return code, f"was stopped by {name} from outside; rerun the command to resume{output}"


class Local(Launcher):
    """Child processes on this machine.

    `devices` are the GPUs to use where the setting `device` is auto or cuda, as
    CUDA_VISIBLE_DEVICES names them (default: all that torch sees); elsewhere they are refused. A
    job sees one of them only. More jobs than GPUs share them evenly.
    """

    name: ClassVar[str] = "local"

    devices: Annotated[tuple[int | str, ...], Field(min_length=1)] | None = None

    def slots(self, needs: Needs) -> int:
        """One job per GPU; on a CPU as many as its cores allow."""
        # With cuda:N all jobs share the named GPU.
        other = 1 if needs.device.startswith("cuda:") else available_cores() // needs.cores
        return len(self._gpus(needs)) or max(1, other)

    @contextmanager
    def session(self, jobs: Sequence[Job], needs: Needs) -> Iterator[Start]:
        """Start child processes, each on the GPU with the fewest jobs."""
        gpus, children = self._gpus(needs), list[Child]()

        def start(job: Job) -> Child:
            busy = Counter(c.environment.get(VISIBLE) for c in children if not c.done())
            gpu = min(gpus, key=lambda name: busy[name], default="")
            children.append(Child(job, {VISIBLE: gpu} if gpu else {}))
            return children[-1]

        yield lambda jobs: [start(job) for job in jobs]

    def _gpus(self, needs: Needs) -> tuple[str, ...]:
        """The GPUs for the jobs; none where the setting `device` chooses another device."""
        gpus = visible_gpus() if needs.device in ("auto", "cuda") else ()
        if self.devices is None:
            return gpus
        if not gpus:
            raise InputError(
                "launcher.devices chooses among GPUs for the device auto or cuda; the device is "
                f"{needs.device}, and {len(visible_gpus())} GPUs are visible"
            )
        return tuple(map(str, self.devices))


def visible_gpus() -> tuple[str, ...]:
    """The GPUs that torch sees, by their names in CUDA_VISIBLE_DEVICES."""
    import torch  # Not needed on hosts that only start children.

    if not torch.cuda.is_available():
        return ()
    count = torch.cuda.device_count()
    names = [part.strip() for part in os.environ.get(VISIBLE, "").split(",") if part.strip()]
    return tuple(names[:count]) if names else tuple(map(str, range(count)))


def available_cores() -> int:
    """The number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
