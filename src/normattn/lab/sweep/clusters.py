"""Run jobs on other hosts: tasks of a Ray cluster, and Slurm jobs by submitit.

Slurm jobs belong to the cluster: where this process is killed, they go on. Cancel them (`scancel`)
before the command is run again; two jobs never work on one run, as each holds its lock.
"""

from __future__ import annotations

import logging
import os
import platform
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, Literal, NoReturn

from pydantic import Field

from normattn.errors import InputError, import_library, unknown_name
from normattn.lab.sweep.launchers import (
    Child,
    Job,
    Launcher,
    Local,
    Needs,
    Start,
    Task,
    visible_gpus,
)

INHERITED = ("PYTHONPATH", "NORMATTN_CACHE", "XDG_CACHE_HOME")
"""Where a job finds code and data; other hosts may have other values."""
CONNECT_SECONDS = 30.0
ASKED_SECONDS = 2.0


@dataclass
class RemoteJob:
    """A job that is sent to another host: called there, it runs the job as a child process.

    Whatever ends the call (an exception that the scheduler's library raises in it) has the child
    save its state first.
    """

    job: Job
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
                    f"{platform.node()} has no folder {folder}: all hosts of a sweep need the "
                    "same folders"
                )
        with _noted_interrupts() as interrupts:
            self.child = Child(self.job, self.environment, self.folder)
            try:
                while not self.child.done() and not interrupts:
                    time.sleep(0.1)
            finally:
                self.save()
            return self.child.result()

    def save(self) -> None:
        """Have the child save its state and end, if there is one."""
        if self.child is not None:
            self.child.stop()
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

    poll_seconds: ClassVar[float] = 0.5

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


def _lacking(name: str, extra: str) -> str:
    return f"--launcher {extra} needs {name}: pip install 'normattn[{extra}]'"


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
    def session(self, jobs: Sequence[Job], needs: Needs) -> Iterator[Start]:
        """Join the cluster, and leave it at the end."""
        ray = import_library("ray", _lacking("ray", "ray"))
        joined = ray.is_initialized()
        if not joined:
            self._join(ray)
        try:
            remote = ray.remote(RemoteJob.__call__).options(
                num_cpus=self.cpus_for(needs),
                num_gpus=self.gpus_for(needs),
                max_retries=self.retries,
            )
            yield lambda jobs: [self._task(job, ray, remote.remote(RemoteJob(job))) for job in jobs]
        finally:
            if not joined:
                ray.shutdown()

    def _task(self, job: Job, ray: Any, handle: Any) -> Task:
        """The reference `handle` to the result of one of Ray's tasks."""

        def done() -> bool:
            return bool(ray.wait([handle], timeout=0)[0])

        def result() -> tuple[int, str]:
            try:
                code, message = ray.get(handle)
                return code, message
            except ray.exceptions.RayError as error:
                cause = getattr(error, "cause", None) or error
                return 1, f"Ray gave it up: {_lines(cause)[0]}"

        def stop() -> None:
            ray.cancel(handle)  # Ray raises KeyboardInterrupt in the task: its child saves.

        def kill() -> None:
            if not done():
                ray.cancel(handle, force=True)  # The worker ends; its child notices.

        # Ray loses an interruption that it raises where Python ignores exceptions: ask again.
        return Task(job, done, result, stop, kill, ask_again_seconds=3.0)

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
            raise InputError(f"no Ray cluster answers at {where}: {_lines(error)[0]}") from error
        finally:
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, before)  # Ray installs a handler of its own.


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
    def session(self, jobs: Sequence[Job], needs: Needs) -> Iterator[Start]:
        """Submit an array of jobs each time."""
        submitit = import_library("submitit", _lacking("submitit", "slurm"))
        logging.getLogger("submitit").setLevel(logging.ERROR)
        # A new folder each time: submitit unpickles what it finds there, so it must be our own.
        place = jobs[0].log.parents[2].resolve() / ".submitit"
        place.mkdir(parents=True, exist_ok=True)
        folder = tempfile.mkdtemp(prefix="", dir=place)
        try:
            executor = submitit.AutoExecutor(
                folder=folder, cluster=self.cluster, slurm_max_num_timeout=self.requeues
            )
        except RuntimeError as error:
            raise InputError(f"Slurm is not available here: {error}") from error
        executor.update_parameters(**self.parameters(needs), name="normattn")

        def start(jobs: Sequence[Job]) -> list[Task]:
            try:
                handles = executor.submit_array(list(map(SlurmJob, jobs)))
            except (OSError, RuntimeError, subprocess.SubprocessError) as error:
                raise InputError(f"the jobs cannot be submitted: {_lines(error)[-1]}") from error
            return [_slurm_task(*pair) for pair in zip(jobs, handles, strict=True)]

        yield start

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
        submission = import_library(
            "submitit", _lacking("submitit", "slurm")
        ).helpers.DelayedSubmission
        return submission(replace(self, child=None))


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit(128 + number)


def _slurm_task(job: Job, handle: Any) -> Task:
    """A job of submitit, by Slurm or by its own executor."""
    ask_at = float("inf")

    def done() -> bool:
        """Whether it left a result, or its scheduler says that it is over.

        A job that was stopped leaves none, so its scheduler is asked every other second.
        """
        nonlocal ask_at
        due = time.monotonic() >= ask_at
        if due:
            ask_at = time.monotonic() + ASKED_SECONDS
        return bool(handle.done(force_check=due))

    def result() -> tuple[int, str]:
        if not handle.paths.result_pickle.exists():
            ended = f"job {handle.job_id} ended without a result"
            return 1, f"{ended}; rerun the command to resume"
        failure = handle.exception()
        if failure is not None:
            return 1, _lines(failure)[-1]
        code, message = handle.result()
        return code, message

    def stop() -> None:
        """Ask its controller, or have Slurm cancel it: its child saves, and then it is ended."""
        nonlocal ask_at
        if handle.done():
            return
        ask_at = time.monotonic() + ASKED_SECONDS
        if hasattr(handle, "_process"):
            # What submitit itself sends to a job of its own executor is followed by force.
            os.kill(int(handle.job_id), signal.SIGTERM)
        else:
            handle.cancel(check=False)

    return Task(job, done, result, stop, kill=stop)


def _lines(error: BaseException) -> list[str]:
    """What an exception says."""
    lines = [line.strip() for line in str(error).split("\n") if line.strip(" -")]
    return lines or [type(error).__name__]


def launcher(name: str, settings: Mapping[str, Any]) -> Launcher:
    """The launcher called `name` with these settings; `InputError` for unknown ones."""
    known: dict[str, type[Launcher]] = {kind.name: kind for kind in (Local, Slurm, Ray)}
    if name not in known:
        raise unknown_name("launcher", name, known)
    return known[name].parse(settings, f"the {name} launcher")
