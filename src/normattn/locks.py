"""Locks between processes, held by the operating system: they end with their holder, even killed.

The file of a lock stays where it is (removing it would let two processes lock two files of one
name) and holds the process id of the last holder and its host, which may be another one.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from normattn.atomic import explain_os_errors
from normattn.errors import InputError

FOREVER = -1.0


class InUseError(InputError):
    """Another process, `holder`, has the lock."""

    def __init__(self, file: Path, holder: str) -> None:
        self.holder = holder
        super().__init__(f"{file} is held by process {holder}")


@contextmanager
def locked(file: Path, seconds: float = FOREVER) -> Iterator[None]:
    """Hold the lock `file`, made with its folder where it is absent.

    Waits up to `seconds` (0: not at all) for another holder. Raises `InUseError` when it is still
    held then, and `InputError` where it cannot be made or the file system has no locks: a marker
    that outlives a killed holder is no substitute.
    """
    lock = FileLock(file, mode=0o644, fallback_to_soft=False)
    with explain_os_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=seconds)
        except Timeout as error:
            raise InUseError(file, _holder(file)) from error
    try:
        with explain_os_errors(file):
            file.write_text(f"{os.getpid()} on {platform.node()}\n")
        yield
    finally:
        lock.release()


def _holder(file: Path) -> str:
    try:
        return file.read_text(errors="replace").strip()[:80] or "unknown"
    except OSError:
        return "unknown"
