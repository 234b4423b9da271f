"""Fork processes, put faults into them, and collect their exit codes and stderr.

A fork inherits the parent's imports, so a command starts within milliseconds.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

CRASHED = 70
AT_ONCE = 4
LIMIT_SECONDS = 300.0
EVENTS = frozenset(
    {
        *("open", "import", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.chmod"),
        *("os.scandir", "os.listdir", "os.truncate", "shutil.rmtree", "subprocess.Popen"),
        *("tempfile.mkstemp", "tempfile.mkdtemp"),
    }
)
"""Audit events of Python, before each of which a fault may occur."""


@dataclass(frozen=True)
class Ended:
    """The exit code (negative for a signal) and the stderr of a process."""

    code: int
    said: str

    @property
    def sentences(self) -> list[str]:
        """The lines that the command itself printed."""
        return [line for line in self.said.splitlines() if line.startswith("normattn: ")]

    @property
    def orderly(self) -> bool:
        """Whether stderr has exactly one sentence and no Python error."""
        wrong = ("Traceback", "Exception ignored", "Error in sys.", "Fatal")
        return len(self.sentences) == 1 and not any(word in self.said for word in wrong)

    @property
    def shown(self) -> str:
        """The exit code and the end of stderr."""
        return f"ended with {self.code}: {self.said.strip()[-400:]!r}"


def race(works: Sequence[Callable[[], int]], limit_seconds: float = LIMIT_SECONDS) -> list[Ended]:
    """Fork a process for each of `works`, start all at once, and wait for all."""
    gate_out, gate_in = os.pipe()
    started = []
    for work in works:
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(gate_in)
            os.close(reader)
            os.read(gate_out, 1)  # Ends when the parent closes its side.
            _become(work, writer)
        os.close(writer)
        started.append((pid, reader))
    os.close(gate_out)
    os.close(gate_in)
    timers = [threading.Timer(limit_seconds, _kill, (pid,)) for pid, _ in started]
    for timer in timers:
        timer.start()
    ends = []
    for (pid, reader), timer in zip(started, timers, strict=True):
        with os.fdopen(reader, errors="replace") as pipe:
            text = pipe.read()
        _, status = os.waitpid(pid, 0)
        timer.cancel()
        ends.append(Ended(os.waitstatus_to_exitcode(status), text))
    return ends


def in_groups(works: Sequence[Callable[[], int]], size: int = AT_ONCE) -> Iterator[Ended]:
    """The results of all `works`, a few running at a time."""
    for start in range(0, len(works), size):
        yield from race(works[start : start + size])


def counting(work: Callable[[], int], told: Callable[[int], None]) -> Callable[[], int]:
    """`work`, which passes its number of events to `told` at the end."""

    def counted() -> int:
        events = [0]

        def count(event: str, arguments: tuple[Any, ...]) -> None:
            events[0] += event in EVENTS

        sys.addaudithook(count)
        code = work()
        told(events[0])
        return code

    return counted


def before_event(
    work: Callable[[], int], number: int, act: Callable[[], None]
) -> Callable[[], int]:
    """`work`, with a call of `act` before its event `number`."""

    def disturbed() -> int:
        events = [0]

        def count(event: str, arguments: tuple[Any, ...]) -> None:
            if event in EVENTS:
                events[0] += 1
                if events[0] == number:
                    act()

        sys.addaudithook(count)
        return work()

    return disturbed


def after_seconds(
    work: Callable[[], int], seconds: float, kind: signal.Signals
) -> Callable[[], int]:
    """`work`, whose process gets a signal after some seconds."""

    def disturbed() -> int:
        pid = os.getpid()
        if os.fork() == 0:
            os.close(2)  # Otherwise the reader of stderr waits for this process.
            time.sleep(seconds)
            if os.getppid() == pid:
                os.kill(pid, kind)
            os._exit(0)
        return work()

    return disturbed


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _become(work: Callable[[], int], stderr: int) -> None:
    code = CRASHED
    try:
        os.dup2(stderr, 2)
        os.close(stderr)
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
        code = work()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)
