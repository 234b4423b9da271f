"""Cells as an array of Slurm jobs, by submitit; requeued when time ends and when pre-empted.

The jobs are the cluster's: where this process is killed, they go on. All of a folder's jobs have
one name, made of the folder, so that the next command finds them by the queue alone: it cancels
them, which saves their state, and submits what is left. No note of ours can come too late.
"""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, ClassVar, Literal, NoReturn

from pydantic import Field

from normattn.errors import InputError
from normattn.lab.sweep.launch.base import Job, Needs, Outcome, Session
from normattn.lab.sweep.launch.local import Errand
from normattn.lab.sweep.launch.ray_cluster import Elsewhere, Remote, library

LEAVING_SECONDS = 180.0
"""How long cancelled jobs of an earlier command may take to save their state and leave."""
QUEUE_SECONDS = 10.0
STOPPING_QUEUE_SECONDS = 1.0
OVER = {
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL"),
    *("OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT"),
}
"""States of a job that will not go on, unless it is requeued in the same moment."""


class Slurm(Remote):
    """Jobs of a Slurm cluster, one array of them.

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
    def session(self, jobs: Sequence[Job], at_once: int, needs: Needs) -> Iterator[Session]:
        """Cancel what an earlier command left in the queue, and submit one array."""
        submitit = library("submitit", "slurm")
        logging.getLogger("submitit").setLevel(logging.ERROR)
        place = jobs[0].log.parents[2].resolve()
        name = f"normattn-{hashlib.sha256(str(place).encode()).hexdigest()[:16]}"
        # A new folder each time: what submitit finds in it is unpickled, so it must be our own.
        (place / ".submitit").mkdir(parents=True, exist_ok=True)
        folder = tempfile.mkdtemp(prefix="", dir=place / ".submitit")
        try:
            executor = submitit.AutoExecutor(
                folder=folder, cluster=self.cluster, slurm_max_num_timeout=self.requeues
            )
        except RuntimeError as error:
            raise InputError(f"no Slurm is here: {error}") from error
        executor.update_parameters(**self.asked(at_once, needs), name=name)
        if self.cluster == "slurm":
            _cancel_earlier(name)
        yield _Array(executor, self.cluster, jobs, at_once)

    def asked(self, at_once: int, needs: Needs) -> dict[str, Any]:
        """What submitit is told of each job, by its names."""
        own = {name: getattr(self, name) for name in ("account", "qos", "constraint", "partition")}
        asked = {f"slurm_{name}": value for name, value in own.items() if value is not None}
        if self.memory is not None:
            asked["mem_gb"] = self.memory
        if self.gpus_for(needs):
            asked["gpus_per_node"] = self.gpus_for(needs)
        return {
            "timeout_min": self.time,
            "cpus_per_task": self.cpus_for(needs),
            "slurm_array_parallelism": at_once,
            "slurm_signal_delay_s": self.warning,
            "slurm_additional_parameters": {"requeue": True},
            **asked,
        }


class Requeued:
    """An errand that saves its state before its job is requeued; submitit calls `checkpoint`."""

    def __init__(self, errand: Errand) -> None:
        self.errand = errand

    def __call__(self) -> Outcome:
        """Run it. SIGTERM, of a pre-emption or of scancel, saves and leaves no result: the job is
        requeued by Slurm, or was cancelled.
        """
        signal.signal(signal.SIGTERM, _leave)
        return self.errand()

    def checkpoint(self) -> Any:
        """Save the state; what to call when the job begins again."""
        self.errand.save()
        again = replace(self.errand, child=None)
        return library("submitit", "slurm").helpers.DelayedSubmission(Requeued(again))


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit(128 + number)


@dataclass(frozen=True)
class _Submitted:
    job: Job
    slurm: Any
    began: float


class _Array(Elsewhere):
    """Submitted jobs, told apart by the queue and by the results that they leave."""

    def __init__(self, executor: Any, cluster: str, jobs: Sequence[Job], at_once: int) -> None:
        super().__init__(jobs)
        self._executor = executor
        self._queue = _Queue() if cluster == "slurm" else None
        self._at_once = len(jobs) if cluster == "slurm" else at_once
        self._at_work: list[_Submitted] = []

    def look(self) -> tuple[list[Job], list[Outcome]]:
        """Submit what may be, and collect those that ended."""
        room = self._at_once - len(self._at_work)
        now, self.waiting = self.waiting[:room], self.waiting[room:]
        self._submit(now)
        for submitted in [submitted for submitted in self._at_work if self._over(submitted)]:
            self._at_work.remove(submitted)
            self.ended.append(_outcome(submitted))
        return self.at_work([submitted.job for submitted in self._at_work]), self.ended

    def unfinished(self) -> int:
        """Those waiting and those submitted."""
        return len(self.waiting) + len(self._at_work)

    def stop(self) -> None:
        """Cancel the jobs: Slurm asks each to end, which saves its state, and waits a while."""
        self.waiting.clear()
        self._cancel()
        if self._queue is not None:
            self._queue.seconds = STOPPING_QUEUE_SECONDS

    def stopped(self) -> bool:
        """Whether every job has left the queue."""
        self._at_work = [submitted for submitted in self._at_work if not self._over(submitted)]
        return not self._at_work

    def kill(self) -> None:
        """Cancel what is still there; Slurm itself uses force when its own patience ends."""
        self._cancel()

    def _cancel(self) -> None:
        left = [submitted.slurm for submitted in self._at_work]
        if self._queue is not None and left:
            ids = [slurm.job_id for slurm in left]
            subprocess.run(("scancel", "--quiet", *ids), check=False)
        elif self._queue is None:
            for slurm in left:
                if not slurm.done():
                    # Its controller hands this on; what submitit sends itself is followed by force.
                    os.kill(int(slurm.job_id), signal.SIGTERM)

    def _submit(self, jobs: Sequence[Job]) -> None:
        if not jobs:
            return
        for job in jobs:
            self.forget_log(job)
        try:
            errands = [Errand(job, ends_with_this=self._queue is None) for job in jobs]
            submitted = self._executor.submit_array([Requeued(errand) for errand in errands])
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:
            raise InputError(f"the cells cannot be submitted: {_last_line(error)}") from error
        for job, slurm in zip(jobs, submitted, strict=True):
            self._at_work.append(_Submitted(job, slurm, time.monotonic()))

    def _over(self, submitted: _Submitted) -> bool:
        if self._queue is None:
            return bool(submitted.slurm.done())
        return submitted.slurm.paths.result_pickle.exists() or self._queue.lost(
            submitted.slurm.job_id
        )


def _cancel_earlier(name: str) -> None:
    """Cancel the user's jobs of this name, and wait until each has saved its state and left.

    Raises `InputError` where Slurm does not answer or a job stays.
    """
    if not (left := _named(name)):
        return
    print(
        f"normattn: cancelling {len(left)} job{'s' * (len(left) > 1)} of an earlier command on "
        "this folder; what they did is saved",
        file=sys.stderr,
    )
    deadline = time.monotonic() + LEAVING_SECONDS
    while left := _named(name):
        subprocess.run(("scancel", "--quiet", *left), check=False)
        if time.monotonic() > deadline:
            raise InputError(
                f"jobs {', '.join(left)} of an earlier command are still in the queue after "
                f"{LEAVING_SECONDS:.0f} s; cancel them first"
            )
        time.sleep(STOPPING_QUEUE_SECONDS)


def _named(name: str) -> list[str]:
    """The user's jobs of this name that wait or run."""
    command = ("squeue", "--me", "--noheader", "--array", f"--name={name}", "--format=%i")
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    if answer.returncode:
        raise InputError(f"squeue does not say what is in the queue: {answer.stderr.strip()}")
    return answer.stdout.split()


class _Queue:
    """The user's jobs as squeue shows them, asked every `seconds`."""

    def __init__(self) -> None:
        self.seconds = QUEUE_SECONDS
        self._asked = float("-inf")
        self._answers = 0
        self._states: dict[str, str] = {}
        self._over_since: dict[str, int] = {}

    def holds(self, job: str) -> bool:
        """Whether this job waits or runs."""
        self._look()
        return self._states.get(job, "COMPLETED") not in OVER

    def lost(self, job: str) -> bool:
        """Whether two answers in a row found it over: after one it may be on its way back into the
        queue, or its result on its way through the file system.
        """
        if self.holds(job):
            self._over_since.pop(job, None)
            return False
        return self._over_since.setdefault(job, self._answers) < self._answers

    def _look(self) -> None:
        if time.monotonic() < self._asked + self.seconds:
            return
        command = ("squeue", "--me", "--noheader", "--array", "--states=all", "--format=%i %T")
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        self._asked = time.monotonic()
        if answer.returncode:
            return  # A controller that is busy says nothing about its jobs.
        self._answers += 1
        pairs = (line.split() for line in answer.stdout.splitlines())
        self._states = {pair[0]: pair[1] for pair in pairs if len(pair) == 2}


def _outcome(submitted: _Submitted) -> Outcome:
    """What the job left, or that it left nothing."""
    seconds = time.monotonic() - submitted.began
    if not submitted.slurm.paths.result_pickle.exists():
        said = f"job {submitted.slurm.job_id} ended without a result; rerun the command to resume"
        return Outcome(submitted.job, 1, said, seconds)
    failure = submitted.slurm.exception()
    if failure is not None:
        return Outcome(submitted.job, 1, _last_line(failure), seconds)
    outcome = submitted.slurm.result()
    assert isinstance(outcome, Outcome)
    return outcome


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).split("\n") if line.strip(" -")]
    return lines[-1] if lines else type(error).__name__
