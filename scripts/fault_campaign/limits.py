"""Limits for work that ought to answer at once: seconds of the processor, and memory."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from pathlib import Path

SECONDS = 20
MEMORY = 2 << 30


def limited(
    work: Callable[[], int], seconds: int = SECONDS, memory: int = MEMORY
) -> Callable[[], int]:
    """`work` in a forked process, killed beyond so many seconds, refused memory beyond so much.

    Seconds are the process's own, so that a busy machine changes no outcome; a process that waits
    is ended by `race` instead.
    """

    def within() -> int:
        held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        used = resource.getrusage(resource.RUSAGE_SELF)
        spent = int(used.ru_utime + used.ru_stime) + 1
        resource.setrlimit(resource.RLIMIT_DATA, (held + memory, held + memory))
        resource.setrlimit(resource.RLIMIT_CPU, (spent + seconds, spent + seconds))
        return work()

    return within


def within_memory(work: Callable[[], int], most: int) -> Callable[[], int]:
    """`work` in a forked process that fails where its resident memory rises by more than `most`.

    The mark is the kernel's own (Linux). Beyond twice as much, memory is refused.
    """

    def within() -> int:
        Path("/proc/self/clear_refs").write_text("5")  # Forgets the highest mark.
        before = _status("VmHWM")
        held = _status("VmData")
        resource.setrlimit(resource.RLIMIT_DATA, (held + 2 * most, held + 2 * most))
        code = work()
        rise = _status("VmHWM") - before
        print(f"{rise / 1e6:,.0f} MB", file=sys.stderr)
        return code or 9 * (rise > most)

    return within


def _status(name: str) -> int:
    """A field of this process's status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
