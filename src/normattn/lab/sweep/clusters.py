"""Run jobs on other hosts: tasks of a Ray cluster, and Slurm jobs by submitit.

Slurm jobs belong to the cluster: where this process is killed, they go on. All jobs of a folder
have one name, made from the folder. The next command finds them in the queue by that name, cancels
them (which saves their state) and submits what is left. So no job is submitted twice, whenever the
first command was killed.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, Literal, NoReturn

import psutil
from pydantic import Field

from normattn.errors import InputError, unknown
from normattn.lab.sweep.launchers import (
    Child,
    Job,
    Launcher,
    Local,
    Needs,
    Outcome,
    Session,
    Task,
    visible_gpus,
)
from normattn.lab.sweep.settings import validated

INHERITED = ("PYTHONPATH", "NORMATTN_CACHE", "XDG_CACHE_HOME")
"""Where a job finds code and data; other hosts may have other values."""
CONNECT_SECONDS = 30.0
LEAVING_SECONDS = 180.0
"""How long cancelled jobs of an earlier command may take to leave the queue."""
QUEUE_SECONDS = 10.0
STOPPING_QUEUE_SECONDS = 1.0
OVER = {
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL"),
    *("OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT"),
}
"""States of a job that will not go on, unless it is requeued in the same moment."""


@dataclass
class RemoteJob:
    """A job that is sent to another host: called there, it runs the job as a child process.

    Whatever ends the call (an exception that the scheduler's library raises in it) has the child
    save its state first. With `owner` (process id and start time) it also stops when that process
    of the same host is gone.
    """

    job: Job
    owner: tuple[int, float] | None = None
    folder: Path = field(default_factory=Path.cwd)
    environment: dict[str, str] = field(
        default_factory=lambda: {name: os.environ[name] for name in INHERITED if name in os.environ}
    )
    child: Child | None = None

    def __post_init__(self) -> None:
        self.job = replace(self.job, log=self.job.log.absolute())

    def __call__(self) -> tuple[int, str]:
        """The exit code and the last line; `InputError` where this host lacks the folders."""
        for folder in (self.folder, self.job.log.parent):
            if not folder.is_dir():
                raise InputError(
                    f"{platform.node()} has no folder {folder}: the hosts of a sweep see the same "
                    "folders"
                )
        with _noted_interrupts() as interrupts:
            self.child = Child(self.job, self.environment, self.folder)
            try:
                while not self.child.done() and not interrupts and not self._abandoned():
                    time.sleep(0.1)
            finally:
                self.save()
            return self.child.result()

    def _abandoned(self) -> bool:
        """Whether the owner is gone."""
        if self.owner is None:
            return False
        try:
            owner = psutil.Process(self.owner[0])
            zombie = owner.status() == psutil.STATUS_ZOMBIE
            return bool(zombie or owner.create_time() != self.owner[1])
        except psutil.NoSuchProcess:
            return True

    def save(self) -> None:
        """Have the child save its state and end, if there is one."""
        if self.child is not None:
            self.child.terminate()
            self.child.process.wait()


@contextmanager
def _noted_interrupts() -> Iterator[list[int]]:
    """Note SIGINT instead of raising it: a second KeyboardInterrupt could hit the clean-up."""
    noted: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield noted
        return
    before = signal.signal(signal.SIGINT, lambda number, frame: noted.append(number))
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)


class Remote(Launcher):
    """Jobs on hosts that a scheduler chooses; all of them see the same folders.

    `cpus` and `gpus` are what each job asks for (default: its threads; a GPU where `device` is
    cuda, or where it is auto and this machine has one).
    """

    cpus: int | None = Field(default=None, ge=1)
    gpus: int | None = Field(default=None, ge=0)

    def slots(self, needs: Needs) -> None:
        """The scheduler decides."""

    def cpus_for(self, needs: Needs) -> int:
        """The CPU cores that a job asks for."""
        return needs.cores if self.cpus is None else self.cpus

    def gpus_for(self, needs: Needs) -> int:
        """The GPUs that a job asks for."""
        if self.gpus is not None:
            return self.gpus
        here = needs.device == "auto" and bool(visible_gpus())
        return int(here or needs.device.startswith("cuda"))


class RemoteSession(Session):
    """A session that looks at a scheduler twice a second."""

    poll_seconds: ClassVar[float] = 0.5


def library(name: str, extra: str) -> Any:
    """The module of a launcher's library; `InputError` says which extra brings it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name.partition(".")[0]:
            raise
        raise InputError(
            f"--launcher {extra} needs {name}: pip install 'normattn[{extra}]'"
        ) from None


class Ray(Remote):
    """Tasks of a Ray cluster.

    `address` is the cluster (HOST:PORT, ray://HOST:PORT, auto; default: that of RAY_ADDRESS, else
    one on this machine, else one started here for this sweep). `retries`: how often a job whose
    node was lost starts again elsewhere, from its checkpoint.
    """

    name: ClassVar[str] = "ray"

    address: str | None = Field(default=None, min_length=1)
    retries: int = Field(default=3, ge=0)

    @contextmanager
    def session(self, jobs: Sequence[Job], needs: Needs) -> Iterator[Session]:
        """Join the cluster, and leave it at the end."""
        ray = library("ray", "ray")
        joined = ray.is_initialized()
        if not joined:
            self._join(ray)
        try:
            task = ray.remote(RemoteJob.__call__).options(
                num_cpus=self.cpus_for(needs),
                num_gpus=self.gpus_for(needs),
                max_retries=self.retries,
            )
            yield _RayTasks(ray, task)
        finally:
            if not joined:
                ray.shutdown()

    def _join(self, ray: Any) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        address = self.address or os.environ.get("RAY_ADDRESS")
        before = signal.getsignal(signal.SIGTERM)
        started = {} if address else {"include_dashboard": False}
        try:
            # Where nothing listens at HOST:PORT, Ray itself waits for minutes.
            host, colon, port = (address or "").removeprefix("ray://").rpartition(":")
            if colon and port.isdecimal():
                socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()
            ray.init(address=self.address, log_to_driver=False, logging_level="ERROR", **started)
        except (OSError, RuntimeError, ValueError) as error:
            where = address or "this machine"
            raise InputError(
                f"no Ray cluster answers at {where}: {_line(error, first=True)}"
            ) from error
        finally:
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, before)  # Ray installs a handler of its own.


class _RayTasks(RemoteSession):
    """References to the results of Ray's tasks."""

    # Ray loses an interruption that it raises where Python ignores exceptions.
    ask_again_seconds: ClassVar[float] = 3.0

    def __init__(self, ray: Any, task: Any) -> None:
        self._ray, self._task = ray, task

    def start(self, jobs: Sequence[Job]) -> list[Task]:
        return [Task(job, self._task.remote(RemoteJob(job))) for job in jobs]

    def is_over(self, task: Task) -> bool:
        return bool(self._ray.wait([task.handle], timeout=0)[0])

    def outcome(self, task: Task) -> Outcome:
        try:
            return task.outcome(*self._ray.get(task.handle))
        except self._ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None) or error
            return task.outcome(1, f"Ray gave it up: {_line(cause, first=True)}")

    def stop(self, tasks: Sequence[Task]) -> None:
        """Have Ray raise KeyboardInterrupt in these tasks: their children save."""
        for task in tasks:
            self._ray.cancel(task.handle)

    def kill(self, tasks: Sequence[Task]) -> None:
        """End the workers; their children notice."""
        for task in (task for task in tasks if not self.is_over(task)):
            self._ray.cancel(task.handle, force=True)


class Slurm(Remote):
    """Jobs of a Slurm cluster, by submitit.

    `partition`, `account`, `qos`, `constraint`: as sbatch takes them. `time`: minutes of a job;
    one that needs more saves its state `warning` seconds before the end and is requeued, at most
    `requeues` times. `memory`: GB of a job. `cluster`: slurm, or local for submitit's own
    executor, which needs no Slurm.
    """

    name: ClassVar[str] = "slurm"

    partition: str | None = Field(default=None, min_length=1)
    account: str | None = Field(default=None, min_length=1)
    qos: str | None = Field(default=None, min_length=1)
    constraint: str | None = Field(default=None, min_length=1)
    time: int = Field(default=60, ge=1)
    warning: int = Field(default=90, ge=1)
    requeues: int = Field(default=100, ge=0)
    memory: float | None = Field(default=None, gt=0)
    cluster: Literal["slurm", "local"] = "slurm"

    @contextmanager
    def session(self, jobs: Sequence[Job], needs: Needs) -> Iterator[Session]:
        """Cancel what an earlier command left in the queue."""
        submitit = library("submitit", "slurm")
        logging.getLogger("submitit").setLevel(logging.ERROR)
        place = jobs[0].log.parents[2].resolve()
        name = f"normattn-{hashlib.sha256(str(place).encode()).hexdigest()[:16]}"
        # A new folder each time: submitit unpickles what it finds there, so it must be our own.
        (place / ".submitit").mkdir(parents=True, exist_ok=True)
        folder = tempfile.mkdtemp(prefix="", dir=place / ".submitit")
        try:
            executor = submitit.AutoExecutor(
                folder=folder, cluster=self.cluster, slurm_max_num_timeout=self.requeues
            )
        except RuntimeError as error:
            raise InputError(f"no Slurm is here: {error}") from error
        executor.update_parameters(**self.parameters(needs), name=name)
        if self.cluster == "slurm":
            _cancel_earlier(name)
            yield _SlurmJobs(executor)
        else:
            yield _LocalJobs(executor)

    def parameters(self, needs: Needs) -> dict[str, Any]:
        """What submitit is given for each job, by its names."""
        own = {name: getattr(self, name) for name in ("account", "qos", "constraint", "partition")}
        given = {f"slurm_{name}": value for name, value in own.items() if value is not None}
        if self.memory is not None:
            given["mem_gb"] = self.memory
        if self.gpus_for(needs):
            given["gpus_per_node"] = self.gpus_for(needs)
        return {
            "timeout_min": self.time,
            "cpus_per_task": self.cpus_for(needs),
            "slurm_signal_delay_s": self.warning,
            "slurm_additional_parameters": {"requeue": True},
            **given,
        }


class SlurmJob(RemoteJob):
    """A job that saves its state before Slurm requeues it; submitit calls `checkpoint`."""

    def __call__(self) -> tuple[int, str]:
        """Run it. SIGTERM (pre-emption, scancel) saves and leaves no result."""
        signal.signal(signal.SIGTERM, _leave)
        return super().__call__()

    def checkpoint(self) -> Any:
        """Save the state; what to call when the job starts again."""
        self.save()
        submission = library("submitit", "slurm").helpers.DelayedSubmission
        return submission(replace(self, child=None))


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit(128 + number)


class _LocalJobs(RemoteSession):
    """Jobs of submitit's own executor, which end with this process."""

    def __init__(self, executor: Any) -> None:
        self._executor = executor
        self._owner: tuple[int, float] | None = (os.getpid(), psutil.Process().create_time())

    def start(self, jobs: Sequence[Job]) -> list[Task]:
        try:
            handles = self._executor.submit_array([SlurmJob(job, self._owner) for job in jobs])
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:
            raise InputError(f"the jobs cannot be submitted: {_line(error)}") from error
        return [Task(job, handle) for job, handle in zip(jobs, handles, strict=True)]

    def is_over(self, task: Task) -> bool:
        return bool(task.handle.done())

    def outcome(self, task: Task) -> Outcome:
        handle = task.handle
        if not handle.paths.result_pickle.exists():
            return task.outcome(
                1, f"job {handle.job_id} ended without a result; rerun the command to resume"
            )
        failure = handle.exception()
        return task.outcome(*((1, _line(failure)) if failure is not None else handle.result()))

    def stop(self, tasks: Sequence[Task]) -> None:
        """Ask the jobs' controllers; what submitit itself sends is followed by force."""
        for task in tasks:
            if not task.handle.done():
                os.kill(int(task.handle.job_id), signal.SIGTERM)

    def kill(self, tasks: Sequence[Task]) -> None:
        self.stop(tasks)


class _SlurmJobs(_LocalJobs):
    """Jobs in Slurm's queue, known by the results that they leave and by squeue's answers."""

    def __init__(self, executor: Any) -> None:
        super().__init__(executor)
        self._owner = None  # It is on another host.
        self._seconds = QUEUE_SECONDS
        self._asked = float("-inf")
        self._answers = 0
        self._states: dict[str, str] = {}
        self._over_since: dict[str, int] = {}

    def is_over(self, task: Task) -> bool:
        """Whether it left a result, or two answers in a row found it over.

        After one answer it may be on its way back into the queue, or its result on its way through
        the file system.
        """
        if task.handle.paths.result_pickle.exists():
            return True
        self._look()
        job = task.handle.job_id
        if self._states.get(job, "COMPLETED") not in OVER:
            self._over_since.pop(job, None)
            return False
        return self._over_since.setdefault(job, self._answers) < self._answers

    def _look(self) -> None:
        """Ask squeue for the states of the user's jobs, if the last answer is old."""
        if time.monotonic() < self._asked + self._seconds:
            return
        answer = _squeue("--states=all", "--format=%i %T")
        self._asked = time.monotonic()
        if answer.returncode:
            return  # A busy controller says nothing about its jobs.
        self._answers += 1
        pairs = (line.split() for line in answer.stdout.splitlines())
        self._states = {pair[0]: pair[1] for pair in pairs if len(pair) == 2}

    def stop(self, tasks: Sequence[Task]) -> None:
        """Cancel the jobs: Slurm asks each to end, which saves its state, and waits a while."""
        _scancel([task.handle.job_id for task in tasks])
        self._seconds = STOPPING_QUEUE_SECONDS


def _cancel_earlier(name: str) -> None:
    """Cancel the user's jobs of this name, and wait until each has saved its state and left.

    Raises `InputError` where Slurm does not answer or a job stays.
    """
    if not (left := _named(name)):
        return
    print(
        f"normattn: cancelling {len(left)} job{'s' * (len(left) > 1)} of an earlier command on "
        "this folder; their state is saved",
        file=sys.stderr,
    )
    deadline = time.monotonic() + LEAVING_SECONDS
    while left := _named(name):
        _scancel(left)
        if time.monotonic() > deadline:
            raise InputError(
                f"jobs {', '.join(left)} of an earlier command are still in the queue after "
                f"{LEAVING_SECONDS:.0f} s; cancel them first"
            )
        time.sleep(STOPPING_QUEUE_SECONDS)


def _named(name: str) -> list[str]:
    """The user's jobs of this name that wait or run."""
    answer = _squeue(f"--name={name}", "--format=%i")
    if answer.returncode:
        raise InputError(f"squeue does not say what is in the queue: {answer.stderr.strip()}")
    return answer.stdout.split()


def _squeue(*options: str) -> subprocess.CompletedProcess[str]:
    command = ("squeue", "--me", "--noheader", "--array", *options)
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _scancel(ids: Sequence[str]) -> None:
    if ids:
        subprocess.run(("scancel", "--quiet", *ids), check=False)


def _line(error: BaseException, first: bool = False) -> str:
    """The first or the last line of what an exception says."""
    lines = [line.strip() for line in str(error).split("\n") if line.strip(" -")]
    return lines[0 if first else -1] if lines else type(error).__name__


def launcher(name: str, settings: Mapping[str, Any]) -> Launcher:
    """The launcher called `name` with these settings; `InputError` for unknown ones."""
    known: dict[str, type[Launcher]] = {kind.name: kind for kind in (Local, Slurm, Ray)}
    if name not in known:
        raise unknown("launcher", name, known)
    return validated(known[name], settings, f"the {name} launcher")
