"""Cells on other hosts: what their launchers share, and tasks of a Ray cluster."""

from __future__ import annotations

import importlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from pydantic import Field

from normattn.errors import InputError
from normattn.lab.sweep.launch.base import Job, Launcher, Needs, Outcome, Session
from normattn.lab.sweep.launch.local import Errand, visible_gpus


class Remote(Launcher):
    """Cells on hosts that a scheduler chooses; all of them see the same folders.

    `cpus` and `gpus` are what each cell asks for (unsaid: its threads; a GPU where the cells'
    `device` is cuda, or where it is auto and this machine has one).
    """

    here: ClassVar[bool] = False

    cpus: int | None = Field(default=None, ge=1)
    gpus: int | None = Field(default=None, ge=0)

    def slots(self, needs: Needs) -> None:
        """The scheduler knows."""

    def cpus_for(self, needs: Needs) -> int:
        """The CPU cores that a cell asks for."""
        return needs.cores if self.cpus is None else self.cpus

    def gpus_for(self, needs: Needs) -> int:
        """The GPUs that a cell asks for."""
        if self.gpus is not None:
            return self.gpus
        sees = needs.device == "auto" and bool(visible_gpus())
        return int(sees or needs.device.startswith("cuda"))

    def said(self) -> str:
        """The settings that differ from their defaults."""
        set_here = self.model_dump(exclude_defaults=True)
        words = ", ".join(f"{name} {value}" for name, value in set_here.items())
        return f"{self.name}: {words}" if words else self.name


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


class Elsewhere(Session):
    """Jobs whose beginning is seen by the log that they open, wherever that happens."""

    poll_seconds: ClassVar[float] = 0.5

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.waiting = list(jobs)
        self.ended: list[Outcome] = []

    def forget_log(self, job: Job) -> None:
        """Drop what an earlier job said, before this one is handed over."""
        job.log.parent.mkdir(parents=True, exist_ok=True)
        job.log.unlink(missing_ok=True)

    def at_work(self, handed_over: Sequence[Job]) -> list[Job]:
        """Those of the jobs that have begun."""
        return [job for job in handed_over if job.log.exists()]


KNOCK_SECONDS = 30.0
# An interruption that Ray raises where Python ignores exceptions is lost: it is raised again.
CANCEL_SECONDS = 3.0


class Ray(Remote):
    """Tasks of a Ray cluster.

    `address` is the cluster (HOST:PORT, ray://HOST:PORT, auto; none: that of RAY_ADDRESS, else one
    that runs on this machine, else one begun on it for this sweep). `retries`: how often a cell
    whose node was lost is begun again elsewhere, and resumes from its checkpoint.
    """

    name: ClassVar[str] = "ray"

    address: str | None = Field(default=None, min_length=1)
    retries: int = Field(default=3, ge=0)

    @contextmanager
    def session(self, jobs: Sequence[Job], at_once: int, needs: Needs) -> Iterator[Session]:
        """Join the cluster, hand over `at_once` tasks at a time, and leave it."""
        ray = library("ray", "ray")
        joined = ray.is_initialized()
        if not joined:
            self._join(ray)
        try:
            task = ray.remote(Errand.__call__).options(
                num_cpus=self.cpus_for(needs),
                num_gpus=self.gpus_for(needs),
                max_retries=self.retries,
            )
            yield _Tasks(ray, task, jobs, at_once)
        finally:
            if not joined:
                ray.shutdown()

    def _join(self, ray: Any) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        address = self.address or os.environ.get("RAY_ADDRESS")
        before = signal.getsignal(signal.SIGTERM)
        begun = {} if address else {"include_dashboard": False}
        try:
            _knock(address)
            ray.init(address=self.address, log_to_driver=False, logging_level="ERROR", **begun)
        except (OSError, RuntimeError, ValueError) as error:
            said = str(error).strip().split("\n")[0]
            where = address or "this machine"
            raise InputError(f"no Ray cluster answers at {where}: {said}") from error
        finally:
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, before)  # Ray puts one of its own in its place.


def _knock(address: str | None) -> None:
    """Raise `OSError` where nothing listens at HOST:PORT, for which Ray waits for minutes."""
    host, colon, port = (address or "").removeprefix("ray://").rpartition(":")
    if colon and port.isdecimal():
        socket.create_connection((host, int(port)), timeout=KNOCK_SECONDS).close()


class _Tasks(Elsewhere):
    """References to what Ray's tasks will return."""

    def __init__(self, ray: Any, task: Any, jobs: Sequence[Job], at_once: int) -> None:
        super().__init__(jobs)
        self._ray = ray
        self._task = task
        self._at_once = at_once
        self._handed: dict[Any, tuple[Job, float]] = {}
        self._cancelled = 0.0

    def look(self) -> tuple[list[Job], list[Outcome]]:
        """Hand over more tasks, and collect those that returned."""
        while self.waiting and len(self._handed) < self._at_once:
            job = self.waiting.pop(0)
            self.forget_log(job)
            self._handed[self._task.remote(Errand(job))] = (job, time.monotonic())
        for reference in self._ready():
            self.ended.append(self._outcome(reference, *self._handed.pop(reference)))
        return self.at_work([job for job, _ in self._handed.values()]), self.ended

    def unfinished(self) -> int:
        """Those waiting and those handed over."""
        return len(self.waiting) + len(self._handed)

    def stop(self) -> None:
        """Cancel the tasks: each has its child save its state."""
        self.waiting.clear()
        self._cancel(self._handed)

    def stopped(self) -> bool:
        """Whether every task has returned or was cancelled."""
        left = set(self._handed) - set(self._ready())
        if left and time.monotonic() - self._cancelled > CANCEL_SECONDS:
            self._cancel(left)
        return not left

    def _cancel(self, references: Iterable[Any]) -> None:
        """Have Ray raise KeyboardInterrupt in these tasks."""
        self._cancelled = time.monotonic()
        for reference in references:
            self._ray.cancel(reference)

    def kill(self) -> None:
        """End the workers; their children notice."""
        for reference in set(self._handed) - set(self._ready()):
            self._ray.cancel(reference, force=True)

    def _ready(self) -> list[Any]:
        references = list(self._handed)
        if not references:
            return []
        ready, _ = self._ray.wait(references, num_returns=len(references), timeout=0)
        return list(ready)

    def _outcome(self, reference: Any, job: Job, began: float) -> Outcome:
        try:
            outcome = self._ray.get(reference)
            assert isinstance(outcome, Outcome)
            return outcome
        except self._ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None) or error
            lines = [line.strip() for line in str(cause).split("\n") if line.strip()]
            said = lines[0] if lines else type(cause).__name__
            return Outcome(job, 1, f"Ray gave it up: {said}", time.monotonic() - began)
