"""Handle SIGINT and SIGTERM in all commands. Imported before all else, so it imports little."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import NoReturn

STOPPED = 130
SIGNALS = (signal.SIGINT, signal.SIGTERM)
_RECORDED = (*SIGNALS, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else []))
GRACE_SECONDS = 10.0
DUPLICATE_SECONDS = 10.0
NO_THREAD = "no thread can be started: raise the limit of processes (ulimit -u) or of memory"
_parent: int | None = None


class Stopped(BaseException):
    """Raised by a signal. A `BaseException`, so that libraries do not catch it as an error."""


def run_stoppable(command: Callable[[], None]) -> None:
    """Run the program; a signal ends it with one message and exit status 130.

    Work that must save its state first, such as a training loop, runs in a `StopRequest`.
    """
    try:
        _guard.install()
        command()
    except BaseException:
        if _guard.by is None:
            raise
        # A library may have turned the stop into another exception.
        _guard.print_message()
        sys.exit(STOPPED)
    finally:
        _guard.uninstall()


def asked_to_stop() -> bool:
    """Return whether a signal arrived: later errors are caused by the stop."""
    return _guard.by is not None


def stop_with_parent(parent: int) -> None:
    """Send SIGTERM to this process, so that it saves its state, when `parent` has ended.

    A killed parent cannot notify its children, so a thread looks twice a second.
    """
    global _parent
    _parent = parent

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="watch-parent", daemon=True).start()


def watched_parent() -> int | None:
    """Return the process whose end stops this one, if any."""
    return _parent


class StopRequest:
    """A context that records signals, so that work can save its state and stop.

    `by` is the name of the first signal, `count` their number. With `insist` a second one acts as
    outside. A SIGTERM soon after the first signal counts as the same: a scheduler signals all
    processes of a tree. Outside the main thread, where Python allows no handlers, none is recorded.
    """

    def __init__(self, insist: bool = True) -> None:
        self.by: str | None = None
        self.count = 0
        self._insist = insist
        self._first = 0.0
        self._handlers: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for signum in _RECORDED:
                self._handlers[signum] = signal.signal(signum, self._record)
            _guard.requests += 1
        return self

    def __exit__(self, *_: object) -> None:
        if self._handlers:
            _guard.requests -= 1
            self._restore()

    def _record(self, signum: int, frame: FrameType | None) -> None:
        if self.by is None:
            self.by, self._first = signal.Signals(signum).name, time.monotonic()
        elif signum == signal.SIGTERM and time.monotonic() < self._first + DUPLICATE_SECONDS:
            return
        elif self._insist:
            self._restore()
            signal.raise_signal(signum)
        self.count += 1

    def _restore(self) -> None:
        for signum, handler in self._handlers.items():
            # None: the handler was not set from Python.
            signal.signal(signum, handler or signal.SIG_DFL)  # type: ignore[arg-type]


class _Guard:
    """The signal handlers, and a thread that ends the process if a stop gets lost."""

    def __init__(self) -> None:
        self.by: str | None = None
        self.requests = 0
        self._printed = False
        self._uninstalled = threading.Event()

    def install(self) -> None:
        for signum in SIGNALS:
            signal.signal(signum, self._stop)
        sys.unraisablehook = self._unraisable
        if sys.platform != "win32":
            read_end, write_end = os.pipe()
            os.set_blocking(write_end, False)
            signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
            try:
                thread = threading.Thread(
                    target=self._watch, args=(read_end,), name="stop", daemon=True
                )
                thread.start()
            except RuntimeError:
                print(f"normattn: {NO_THREAD}", file=sys.stderr)
                sys.exit(2)

    def uninstall(self) -> None:
        """Ignore signals from now on, while the interpreter shuts down."""
        for signum in SIGNALS:
            signal.signal(signum, signal.SIG_IGN)
        self._uninstalled.set()

    def print_message(self) -> None:
        if not self._printed:
            self._printed = True
            message = f"normattn: stopped by {self.by}; rerun the command to resume"
            print(message, file=sys.stderr, flush=True)

    def _stop(self, signum: int, frame: FrameType | None) -> NoReturn:
        if self.by is not None:
            self._end_now()  # A second signal: do not wait.
        self.by = signal.Signals(signum).name
        raise Stopped

    def _unraisable(self, unraisable: sys.UnraisableHookArgs) -> None:
        """End the process for a stop that Python drops, in a destructor or callback."""
        if isinstance(unraisable.exc_value, Stopped):
            self._end_now()
        sys.__unraisablehook__(unraisable)

    def _watch(self, pipe: int) -> None:
        """Wait for signals; end the process if no handler can run, as inside a long call into C."""
        while True:
            signum = os.read(pipe, 1)[0]
            if signum in SIGNALS and not self.requests:
                received = signal.Signals(signum)
                break
        if self._uninstalled.wait(GRACE_SECONDS):
            return
        self.by = self.by or received.name
        self._end_now()

    def _end_now(self) -> NoReturn:
        self.print_message()
        os._exit(STOPPED)


_guard = _Guard()
