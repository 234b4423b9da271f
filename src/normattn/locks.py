"""Locks between processes. The operating system releases them when the holder ends or is killed.

Lock files hold the holder's process id, host and, of a worker, parent. They are never deleted:
otherwise two processes could lock two files of the same name.
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
MIN_WAIT_SECONDS = 1.0
"""Minimum time to wait: a killed process holds its lock until the system has removed it."""
ORPHAN_WAIT_SECONDS = 60.0
"""Time to wait for a holder whose parent has ended."""
_POLL_SECONDS = 0.05
_HOLDER = re.compile(r"(?P<process>\d+) on (?P<host>.*)(?:\nstarted by (?P<parent>\d+))?")


class InUseError(InputError):
    """Another process, `holder`, holds the lock."""

    def __init__(self, file: Path, holder: str) -> None:
        self.holder = holder
        super().__init__(f"{file} is held by process {holder}")


@contextmanager
def locked(file: Path, seconds: float = FOREVER) -> Iterator[None]:
    """Hold the lock `file` inside; create it and its folder if needed.

    Waits for another holder for up to `seconds`, at least one second, and a minute if it or its
    parent was killed. Raises `InUseError` if it is still held then, and `InputError` if it cannot
    be created or the file system has no locks (a marker file would outlive a killed holder).
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
    start, timeout, warned = time.monotonic(), max(seconds, MIN_WAIT_SECONDS), False
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
                warned, timeout = True, max(seconds, ORPHAN_WAIT_SECONDS)
                warn(
                    f"normattn: waiting for process {name} to end: it was at work in "
                    f"{file.parent} when it, or the command that started it, was killed"
                )
            if time.monotonic() - start > timeout:
                raise InUseError(file, name) from error


def _is_ending(holder: str) -> bool:
    """Return whether a holder is a process of this host that was killed or has lost its parent."""
    match = _HOLDER.fullmatch(holder)
    if match is None or match["host"] != platform.node():
        return False
    try:
        process = psutil.Process(int(match["process"]))
        if process.status() == psutil.STATUS_ZOMBIE:
            return True
        return match["parent"] is not None and process.ppid() != int(match["parent"])
    except psutil.NoSuchProcess:
        return True
