"""Nothing here may wait or take much memory: a test that waits is stopped, and fails."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest

LIMIT = 60
MEMORY = 2 << 30  # What may be allocated beyond what is held when a test begins.


class Hangs(BaseException):
    """Not an `Exception`: no guard may mistake it for a foreign library's error."""


@pytest.fixture(autouse=True)
def _in_time() -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise Hangs(f"no answer within {LIMIT} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(LIMIT)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture
def little_memory() -> Iterator[None]:
    """An address space that a model of absurd sizes does not fit into."""
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)
