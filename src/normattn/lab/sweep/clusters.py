"""Run jobs on other hosts: as tasks of a Ray cluster, or as Slurm jobs by submitit.

Slurm jobs survive this process: cancel them (`scancel`) before you run the command again. Two jobs
never work on one run, as each holds its lock.
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
from typing import Any, ClassVar, Literal

from pydantic import Field

from normattn.errors import InputError, Interrupted, import_library, unknown_name
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
from normattn.stopping import StopRequest
from normattn.terminal import warn

INHERITED = ("PYTHONPATH", "NORMATTN_CACHE", "XDG_CACHE_HOME")
"""Environment variables that other hosts receive, for code and data."""
CONNECT_SECONDS = 30.0


@dataclass
class RemoteJob:
    """A job for another host: a child process there, which saves its state on an interruption."""

    job: Job
    folder: Path = field(default_factory=Path.cwd)
    environment: dict[str, str] = field(
        default_factory=lambda: {name: os.environ[name] for name in INHERITED if name in os.environ}
    )
    child: Child | None = None

    def __post_init__(self) -> None:
        self.job = replace(self.job, log=self.job.log.absolute())

    def __call__(self) -> tuple[int, str]:
        """Run the job; return its exit code and why it failed.

        Raises `InputError` where this host lacks the folders, and `SystemExit` after a SIGTERM
        (pre-emption, scancel): a job without a result may be started again.
        """
        for folder in (self.folder, self.job.log.parent):
            if not folder.is_dir():
                raise InputError(
                    f"{platform.node()} has no folder {folder}: all hosts of a sweep need the "
                    "same folders"
                )
        with StopRequest(insist=False) as stop:
            self.child = Child(self.job, self.environment, self.folder)
            try:
                while not self.child.done() and not stop.count:
                    time.sleep(0.1)
            finally:
                self.save()
        if stop.by == "SIGTERM":
            raise SystemExit(128 + signal.SIGTERM)
        return self.child.result()

    def save(self) -> None:
        """Let the child, if there is one, save its state and end."""
        if self.child is not None:
            self.child.stop()
            self.child.process.wait()

    def checkpoint(self) -> Any:
        """Save the state before Slurm requeues the job; return its next start, for submitit."""
        from submitit.helpers import DelayedSubmission  # Only where submitit calls this.

        self.save()
        return DelayedSubmission(replace(self, child=None))


class Remote(Launcher):
    """Jobs on hosts that a scheduler chooses, all with the same folders.

    `cpus` and `gpus` are per job (default: its threads; one GPU where `device` is cuda, or where it
    is auto and this machine has one).
    """

    poll_seconds: ClassVar[float] = 0.5
    stop_again_seconds: ClassVar[float] = 3.0

    cpus: int | None = Field(default=None, ge=1)
    gpus: int | None = Field(default=None, ge=0)

    def slots(self, needs: Needs) -> None:
        """None: the scheduler decides."""

    def resources(self, needs: Needs) -> tuple[int, int]:
        """The CPU cores and the GPUs of a job."""
        cpus = needs.cores if self.cpus is None else self.cpus
        if self.gpus and needs.device == "cpu":
            raise InputError(f"launcher.gpus is {self.gpus}, and the jobs run on a CPU")
        if self.gpus is not None:
            return cpus, self.gpus
        auto_gpu = needs.device == "auto" and bool(visible_gpus())
        return cpus, int(auto_gpu or needs.device.startswith("cuda"))

    def library(self, name: str) -> Any:
        """Import the library of this scheduler; raises `InputError` where it is not installed."""
        extra = f"pip install 'normattn[{self.name}]'"
        return import_library(name, f"--launcher {self.name} needs {name}: {extra}")


class Ray(Remote):
    """Tasks of a Ray cluster.

    `address` is the cluster: HOST:PORT, ray://HOST:PORT or auto (default: RAY_ADDRESS, else a
    cluster on this machine, else a new one for this sweep). `retries` limits how often a job whose
    node was lost resumes on another node from its checkpoint.
    """

    name: ClassVar[str] = "ray"

    address: str | None = Field(default=None, min_length=1)
    retries: int = Field(default=3, ge=0)

    @contextmanager
    def session(self, jobs: Sequence[Job], needs: Needs) -> Iterator[Start]:
        """Connect to the cluster, and disconnect at the end."""
        ray = self.library("ray")
        was_connected = ray.is_initialized()
        if not was_connected:
            self._connect(ray)
        try:
            cpus, gpus = self.resources(needs)
            nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            if not any(n.get("CPU", 0) >= cpus and n.get("GPU", 0) >= gpus for n in nodes):
                warn(
                    f"warning: no node of the Ray cluster has the {cpus} CPU cores and {gpus} GPUs "
                    "of a job (launcher.cpus, launcher.gpus): the jobs wait for one"
                )
            remote = ray.remote(RemoteJob.__call__).options(
                num_cpus=cpus, num_gpus=gpus, max_retries=self.retries
            )
            yield lambda jobs: [_RayTask(job, ray, remote.remote(RemoteJob(job))) for job in jobs]
        finally:
            if not was_connected:
                ray.shutdown()

    def _connect(self, ray: Any) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        address = self.address or os.environ.get("RAY_ADDRESS")
        previous = signal.getsignal(signal.SIGTERM)
        options = {} if address else {"include_dashboard": False}
        try:
            # Try to connect first: where nothing listens at HOST:PORT, Ray waits for minutes.
            host, colon, port = (address or "").removeprefix("ray://").rpartition(":")
            if colon and port.isdecimal():
                socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()
            ray.init(address=self.address, log_to_driver=False, logging_level="ERROR", **options)
        except SystemExit as error:  # Ray's handler of SIGTERM.
            raise Interrupted("stopped while connecting to Ray; rerun the command") from error
        except Exception as error:  # Ray raises no narrower one.
            where = address or "this machine"
            raise InputError(f"no Ray cluster answers at {where}: {_lines(error)[0]}") from error
        finally:
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, previous)  # Ray replaces the handler.


class _RayTask(Task):
    """A job as a task of Ray; `reference` is that of its result."""

    def __init__(self, job: Job, ray: Any, reference: Any) -> None:
        super().__init__(job)
        self.ray, self.reference = ray, reference

    def done(self) -> bool:
        return bool(self.ray.wait([self.reference], timeout=0)[0])

    def result(self) -> tuple[int, str]:
        try:
            code, message = self.ray.get(self.reference)
            return code, message
        except self.ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None) or error
            return 1, f"Ray could not finish it: {_lines(cause)[0]}"

    def stop(self) -> None:
        self.ray.cancel(self.reference)  # May be lost, so the launcher repeats it.

    def kill(self) -> None:
        self.ray.cancel(self.reference, force=True)


class Slurm(Remote):
    """Jobs of a Slurm cluster, by submitit.

    - `partition`, `account`, `qos`, `constraint`: as for sbatch.
    - `time`: minutes of a job. A job that needs more saves its state `warning` seconds before the
      end and is requeued, at most `requeues` times.
    - `memory`: GB of a job.
    - `cluster`: slurm, or local for submitit's local executor, which needs no Slurm.
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
        """Submit jobs as arrays."""
        submitit = self.library("submitit")
        logging.getLogger("submitit").setLevel(logging.ERROR)
        # A new folder each time, as submitit unpickles the files that it finds there.
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

        def start(jobs: Sequence[Job]) -> list[_SlurmTask]:
            try:
                handles = executor.submit_array(list(map(RemoteJob, jobs)))
            except (OSError, RuntimeError, subprocess.SubprocessError) as error:
                raise InputError(f"the jobs cannot be submitted: {_lines(error)[-1]}") from error
            return list(map(_SlurmTask, jobs, handles))

        yield start

    def parameters(self, needs: Needs) -> dict[str, Any]:
        """The parameters of submitit for each job."""
        cpus, gpus = self.resources(needs)
        parameters = {
            "timeout_min": self.time,
            "cpus_per_task": cpus,
            "gpus_per_node": gpus or None,
            "mem_gb": self.memory,
            "slurm_signal_delay_s": self.warning,
            "slurm_additional_parameters": {"requeue": True},
            "slurm_partition": self.partition,
            "slurm_account": self.account,
            "slurm_qos": self.qos,
            "slurm_constraint": self.constraint,
        }
        return {name: value for name, value in parameters.items() if value is not None}


class _SlurmTask(Task):
    """A job that submitit has submitted; `handle` is submitit's."""

    def __init__(self, job: Job, handle: Any) -> None:
        super().__init__(job)
        self.handle, self.stopped = handle, False

    def done(self) -> bool:
        return bool(self.handle.done())

    def result(self) -> tuple[int, str]:
        handle = self.handle
        if not handle.paths.result_pickle.exists():
            message = f"job {handle.job_id} ended without a result; rerun the command to resume"
            return 1, message
        failure = handle.exception()
        if failure is not None:
            return 1, _lines(failure)[-1]
        code, message = handle.result()
        return code, message

    def stop(self) -> None:
        if self.handle.done(force_check=self.stopped):
            return
        self.stopped = True
        if hasattr(self.handle, "_process"):
            # `handle.cancel` would kill a local job soon after its signal.
            os.kill(int(self.handle.job_id), signal.SIGTERM)
        else:
            self.handle.cancel(check=False)

    def kill(self) -> None:
        if self.handle.done(force_check=True):
            return
        if not hasattr(self.handle, "_process"):
            # At once; only a pending job is left to be cancelled.
            subprocess.call(["scancel", "--signal=KILL", self.handle.job_id])
        self.handle.cancel(check=False)


def _lines(error: BaseException) -> list[str]:
    lines = [line.strip() for line in str(error).split("\n") if line.strip(" -")]
    return lines or [type(error).__name__]


def launcher(name: str, settings: Mapping[str, Any]) -> Launcher:
    """The launcher of this name with these settings; raises `InputError` for unknown ones."""
    launchers: dict[str, type[Launcher]] = {kind.name: kind for kind in (Local, Slurm, Ray)}
    if name not in launchers:
        raise unknown_name("launcher", name, launchers)
    return launchers[name].parse(settings, f"the {name} launcher")
