"""A job as a child process, on this host or on the one that a scheduler chose."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from normattn.errors import InputError
from normattn.lab.sweep.launch.seam import FINISHED, Job, Outcome

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
