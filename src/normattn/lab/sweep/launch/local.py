"""Cells as child processes of this one, each in a device slot: a GPU, or a share of the cores."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, ClassVar

import psutil
from pydantic import Field

from normattn.errors import InputError
from normattn.lab.sweep.launch.base import FINISHED, Job, Launcher, Needs, Outcome, Session

POLL_SECONDS = 0.1
# What decides where a child finds code and data, and what other hosts may say otherwise.
CARRIED = ("PYTHONPATH", "NORMATTN_CACHE", "XDG_CACHE_HOME")


def one_thread(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` with every numerical library held to one thread, so that jobs do not matter."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
    return {**environment, **dict.fromkeys(names, "1"), "TOKENIZERS_PARALLELISM": "false"}


class Child:
    """A running job, in a process group of its own: a Ctrl-C reaches the parent alone.

    `environment` is laid over this process's; `folder` is where the child works.
    """

    def __init__(
        self, job: Job, environment: Mapping[str, str] | None = None, folder: Path | None = None
    ) -> None:
        self.job = job
        self.started = time.monotonic()
        job.log.parent.mkdir(parents=True, exist_ok=True)
        with job.log.open("w") as log:
            self.process = subprocess.Popen(
                # -P: a module in the folder where the user stands is no part of the child.
                (sys.executable, "-P", *job.arguments, str(os.getpid())),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=one_thread({**os.environ, **(environment or {})}),
                cwd=folder,
            )

    def done(self) -> bool:
        """Whether it has ended."""
        return self.process.poll() is not None

    def terminate(self) -> None:
        """Ask it to save its state and end."""
        if not self.done():
            self.process.terminate()

    def kill(self) -> None:
        """End it now."""
        if not self.done():
            self.process.kill()
            self.process.wait()

    def outcome(self) -> Outcome:
        """How it ended; waits until it has."""
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


@dataclass
class Errand:
    """A job as it travels to another host, which sees the same folders: called there, it runs the
    job as a child and returns how that ended.

    Whatever ends the caller's wait (an exception that a scheduler's library raises in it) has the
    child save its state first. With `ends_with_this` it also ends when the process that made the
    errand is gone, which must be one of the same host.
    """

    job: Job
    folder: Path = field(default_factory=Path.cwd)
    environment: dict[str, str] = field(
        default_factory=lambda: {name: os.environ[name] for name in CARRIED if name in os.environ}
    )
    child: Child | None = None
    ends_with_this: bool = False
    sender: tuple[int, float] | None = None

    def __post_init__(self) -> None:
        """Elsewhere, paths are not relative to this folder."""
        self.job = replace(self.job, log=self.job.log.absolute())
        if self.ends_with_this and self.sender is None:
            self.sender = (os.getpid(), psutil.Process().create_time())

    def __call__(self) -> Outcome:
        """Run the job; `InputError` where this host does not see its folders."""
        settings = self.job.log.parent
        for folder in (self.folder, settings):
            if not folder.is_dir():
                raise InputError(
                    f"{platform.node()} has no folder {folder}: the hosts of a sweep see the same "
                    "folders"
                )
        with _interruptions() as heard:
            self.child = Child(self.job, self.environment, self.folder)
            try:
                while not self.child.done() and not heard and not self._abandoned:
                    time.sleep(POLL_SECONDS)
            finally:
                self.save()
            return self.child.outcome()

    @property
    def _abandoned(self) -> bool:
        """Whether the process that must live on is gone."""
        if self.sender is None:
            return False
        number, began = self.sender
        try:
            process = psutil.Process(number)
            return bool(process.create_time() != began or process.status() == psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return True

    def save(self) -> None:
        """Have the child, if there is one at work, save its state and end."""
        if self.child is not None:
            self.child.terminate()
            self.child.process.wait()


@contextmanager
def _interruptions() -> Iterator[list[int]]:
    """The interruptions of this process, taken note of instead of raised.

    A KeyboardInterrupt that comes twice may be raised where nothing has told the child yet.
    """
    heard: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield heard
        return
    before = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    try:
        yield heard
    finally:
        signal.signal(signal.SIGINT, before)


VISIBLE = "CUDA_VISIBLE_DEVICES"


class Local(Launcher):
    """Child processes on this machine.

    `devices` are the GPUs to use, as CUDA_VISIBLE_DEVICES names them (none: all that torch sees,
    where the cells' `device` is auto or cuda). A cell sees one of them alone; more cells than
    devices share them evenly.
    """

    name: ClassVar[str] = "local"
    here: ClassVar[bool] = True

    devices: Annotated[tuple[int | str, ...], Field(min_length=1)] | None = None

    def slots(self, needs: Needs) -> int:
        """A cell on each GPU; on a CPU as many as the cores have threads for."""
        if needs.device.startswith("cuda:"):
            return 1  # All of them on the one that is named.
        return len(self._gpus(needs)) or max(1, cores() // needs.cores)

    @contextmanager
    def session(self, jobs: Sequence[Job], at_once: int, needs: Needs) -> Iterator[Session]:
        """Start children as slots become free."""
        gpus = self._gpus(needs)
        yield _Children(jobs, [gpus[n % len(gpus)] if gpus else None for n in range(at_once)])

    def said(self) -> str:
        """Which devices."""
        named = "" if self.devices is None else f" on GPU {', '.join(map(str, self.devices))}"
        return f"child processes of this machine{named}"

    def _gpus(self, needs: Needs) -> tuple[str, ...]:
        """What each slot's CUDA_VISIBLE_DEVICES is made of; empty where a slot is of cores."""
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


class _Children(Session):
    """At most one child in each of `slots`, which are GPUs or, without a name, shares of cores."""

    def __init__(self, jobs: Sequence[Job], slots: Sequence[str | None]) -> None:
        self._waiting = list(jobs)
        self._free = list(slots)
        self._running: list[tuple[Child, str | None]] = []
        self._ended: list[Outcome] = []

    def look(self) -> tuple[list[Job], list[Outcome]]:
        """Fill the free slots, and collect who ended."""
        while self._waiting and self._free:
            slot = self._free.pop(0)
            alone = {} if slot is None else {VISIBLE: slot}
            self._running.append((Child(self._waiting.pop(0), alone), slot))
        for child, slot in [pair for pair in self._running if pair[0].done()]:
            self._running.remove((child, slot))
            self._free.append(slot)
            self._ended.append(child.outcome())
        return [child.job for child, _ in self._running], self._ended

    def unfinished(self) -> int:
        """Those waiting and those at work."""
        return len(self._waiting) + len(self._running)

    def stop(self) -> None:
        """Tell every child."""
        for child, _ in self._running:
            child.terminate()

    def stopped(self) -> bool:
        """Whether every child has ended."""
        return all(child.done() for child, _ in self._running)

    def kill(self) -> None:
        """Kill every child."""
        for child, _ in self._running:
            child.kill()
