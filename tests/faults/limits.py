"""Limits for work that ought to answer at once: seconds of the processor, and memory."""

from __future__ import annotations

import resource
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
