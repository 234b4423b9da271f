"""Locks between processes, held by the operating system: they end with their holder, even killed.

The lock's file stays: removing it would let two processes lock two files of one name. It holds the
process id and the host of the last holder, and, where that is a worker that ends with the process
that started it, that process's id.
"""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from filelock import FileLock, Timeout

from normattn.errors import InputError
from normattn.io import explain_os_errors
from normattn.stopping import watched_parent
from normattn.terminal import warn

FOREVER = -1.0
KILLED_SECONDS = 1.0
"""How long a lock is waited for at least: a killed process holds it until it is taken apart."""
ENDING_SECONDS = 60.0
"""How long a holder is waited for that has lost the process that started it."""
_POLL_SECONDS = 0.05
_HOLDER = re.compile(r"(?P<process>\d+) on (?P<host>.*)(?:\nstarted by (?P<parent>\d+))?")


class InUseError(InputError):
    """Another process, `holder`, has the lock."""

    def __init__(self, file: Path, holder: str) -> None:
        self.holder = holder
        super().__init__(f"{file} is held by process {holder}")


@contextmanager
def locked(file: Path, seconds: float = FOREVER) -> Iterator[None]:
    """Hold the lock `file`, made with its folder where it is absent.

    Waits up to `seconds` (0: not at all) for another holder. One that is about to end, because it
    or the process that started it was killed, is waited for in any case, and stderr says so.
    Raises `InUseError` when the lock is still held then, and `InputError` where it cannot be made
    or the file system has no locks: a marker that outlives a killed holder is no substitute.
    """
    lock = FileLock(file, mode=0o644, fallback_to_soft=False)
    with explain_os_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        if seconds == FOREVER:
            lock.acquire()
        else:
            _acquire(lock, file, seconds)
    try:
        with explain_os_errors(file):
            parent = watched_parent()
            started = "" if parent is None else f"started by {parent}\n"
            file.write_text(f"{os.getpid()} on {platform.node()}\n{started}")
        yield
    finally:
        lock.release()


def _acquire(lock: FileLock, file: Path, seconds: float) -> None:
    """Take the lock; `InUseError` where another process keeps it."""
    begun, patience, warned = time.monotonic(), max(seconds, KILLED_SECONDS), False
    while True:
        try:
            lock.acquire(timeout=_POLL_SECONDS, poll_interval=_POLL_SECONDS)
            return
        except Timeout as error:
            try:
                holder = file.read_text(errors="replace").strip()
            except OSError:
                holder = ""
            name = holder.partition("\n")[0][:80] or "unknown"
            if not warned and _is_ending(holder):
                warned, patience = True, max(seconds, ENDING_SECONDS)
                warn(
                    f"normattn: waiting for process {name} to end: it was at work in "
                    f"{file.parent} when it, or the command that started it, was killed"
                )
            if time.monotonic() - begun > patience:
                raise InUseError(file, name) from error


def _is_ending(holder: str) -> bool:
    """Whether a holder is a process of this host that was killed, or has lost its parent."""
    found = _HOLDER.fullmatch(holder)
    if found is None or found["host"] != platform.node():
        return False
    try:
        process = psutil.Process(int(found["process"]))
        if process.status() == psutil.STATUS_ZOMBIE:
            return True
        return found["parent"] is not None and process.ppid() != int(found["parent"])
    except psutil.NoSuchProcess:
        return True
