"""Limits on CPU time and memory, for work that should finish at once."""

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
    """`work` for a forked process, with limits on its CPU seconds and on further memory.

    CPU time does not depend on the machine's load. `race` ends a process that only waits.
    """

    def within() -> int:
        memory_used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        used = resource.getrusage(resource.RUSAGE_SELF)
        spent = int(used.ru_utime + used.ru_stime) + 1
        resource.setrlimit(resource.RLIMIT_DATA, (memory_used + memory, memory_used + memory))
        resource.setrlimit(resource.RLIMIT_CPU, (spent + seconds, spent + seconds))
        return work()

    return within


def within_memory(work: Callable[[], int], most: int) -> Callable[[], int]:
    """`work` for a forked process; it fails if its resident memory rises by more than `most`.

    The peak is the kernel's (Linux). Allocations beyond twice as much fail.
    """

    def within() -> int:
        Path("/proc/self/clear_refs").write_text("5")  # Reset the peak.
        before = _status("VmHWM")
        data_size = _status("VmData")
        resource.setrlimit(resource.RLIMIT_DATA, (data_size + 2 * most, data_size + 2 * most))
        code = work()
        rise = _status("VmHWM") - before
        print(f"{rise / 1e6:,.0f} MB", file=sys.stderr)
        return code or 9 * (rise > most)

    return within


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
