"""Ctrl-C and SIGTERM as a request: the loop ends its step, saves, and stops."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from normattn.stopping import SIGNALS, HandledElsewhere

SAME_SECONDS = 10.0


class StopRequest:
    """Whether a stop was asked for, and by what."""

    def __init__(self) -> None:
        self.by: str | None = None


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Note the first SIGINT or SIGTERM; a second one acts as if this were not here.

    A SIGTERM soon after another is the same request: a scheduler signals a whole tree of processes,
    and parents there hand it on to their children.
    Outside the main thread, where Python allows no handlers, nothing is installed.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before: dict[signal.Signals, Any] = {}
    first = float("inf")

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal first
        if request.by is None:
            request.by, first = signal.Signals(number).name, time.monotonic()
        elif number != signal.SIGTERM or time.monotonic() > first + SAME_SECONDS:
            for known, handler in before.items():
                signal.signal(known, handler)
            signal.raise_signal(number)

    for known in SIGNALS:
        before[known] = signal.signal(known, note) or signal.SIG_DFL
    try:
        with HandledElsewhere():
            yield request
    finally:
        for known, handler in before.items():
            signal.signal(known, handler)
