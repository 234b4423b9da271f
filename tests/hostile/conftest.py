"""Nothing here may wait for anything: a test that does is stopped, and fails."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from types import FrameType

import pytest

LIMIT = 60


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
