"""SIGINT and SIGTERM, whatever a command is doing: one sentence on stderr, exit status 130.

This is imported before everything else, so it imports next to nothing.
"""

from __future__ import annotations

import _thread
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
_NOTED = (*SIGNALS, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else []))
GRACE_SECONDS = 10.0
SAME_SECONDS = 10.0
_POLL_SECONDS = 0.02
NO_THREAD = "no thread can be started: raise the limit of processes (ulimit -u) or of memory"
_PR_SET_PDEATHSIG = 1
_parent: int | None = None


class Stopped(BaseException):
    """A signal asked this process to stop; no library may take it for an error."""


def run_stoppable(command: Callable[[], None]) -> None:
    """Run `command`, the whole program; a signal ends it by one sentence and exit status 130.

    Work that has a better answer (a training loop saves first) runs in a `StopRequest`.
    """
    try:
        _guard.install()
        command()
    except BaseException:
        if _guard.by is None:
            raise
        # Whatever a library made of the stop, it was a stop.
        _guard.say()
        sys.exit(STOPPED)
    finally:
        _guard.leave()


def asked_to_stop() -> bool:
    """Whether a signal came to the guard: an error after that is the stop's doing."""
    return _guard.by is not None


def stop_with_parent(parent: int, poll: float = 0.5) -> None:
    """Have this process get SIGTERM, so that it saves its state, once `parent` has ended.

    A parent that was killed cannot tell its children. On Linux the system does, at once (its
    PR_SET_PDEATHSIG, which goes by the thread that started this process: it must wait for it);
    elsewhere a thread looks every `poll` seconds.
    """
    global _parent
    _parent = parent
    if _system_tells():
        # The parent may have ended before the system was asked.
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGTERM)
        return

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(poll)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="watch-parent", daemon=True).start()


def watched_parent() -> int | None:
    """The process with which this one ends, if there is one."""
    return _parent


def _system_tells() -> bool:
    """Ask Linux for a SIGTERM when the parent ends; False where the system has no such thing."""
    if not sys.platform.startswith("linux"):
        return False
    import ctypes  # Only workers need it.

    try:
        return bool(ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0) == 0)
    except (OSError, AttributeError):
        return False


class StopRequest:
    """A context in which signals are noted, so that work can save its state and stop.

    `by` names the first signal, `count` how many there were. With `insist` a second signal acts as
    if this context were not there. A SIGTERM soon after another is the same request: a scheduler
    signals a whole tree of processes, and parents there hand it on to their children. Outside the
    main thread, where Python allows no handlers, nothing is noted.
    """

    def __init__(self, insist: bool = True) -> None:
        self.by: str | None = None
        self.count = 0
        self._insist = insist
        self._first = 0.0
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in _NOTED:
                self._before[number] = signal.signal(number, self._note)
            _guard.elsewhere += 1
        return self

    def __exit__(self, *_: object) -> None:
        if self._before:
            _guard.elsewhere -= 1
            self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.by is None:
            self.by, self._first = signal.Signals(number).name, time.monotonic()
        elif number == signal.SIGTERM and time.monotonic() < self._first + SAME_SECONDS:
            return
        elif self._insist:
            self._restore()
            signal.raise_signal(number)
        self.count += 1

    def _restore(self) -> None:
        for number, handler in self._before.items():
            # None is a handler that was not set from Python.
            signal.signal(number, handler or signal.SIG_DFL)  # type: ignore[arg-type]


class _Guard:
    """The handlers, and a thread that sees to it that a stop is not lost."""

    def __init__(self) -> None:
        self.by: str | None = None
        self.elsewhere = 0
        self._said = False
        self._lost = False
        self._left = threading.Event()

    def install(self) -> None:
        """Put the handlers in place."""
        for number in SIGNALS:
            signal.signal(number, self._stop)
        sys.unraisablehook = self._unraisable
        if sys.platform != "win32":
            out, into = os.pipe()
            os.set_blocking(into, False)
            signal.set_wakeup_fd(into, warn_on_full_buffer=False)
            try:
                threading.Thread(target=self._watch, args=(out,), name="stop", daemon=True).start()
            except RuntimeError:
                print(f"normattn: {NO_THREAD}", file=sys.stderr)
                sys.exit(2)

    def leave(self) -> None:
        """The outcome is decided; what the interpreter does at its end is not to be disturbed."""
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        self._left.set()

    def say(self) -> None:
        """The sentence, once."""
        if not self._said:
            self._said = True
            sentence = f"normattn: stopped by {self.by}; rerun the command to resume"
            print(sentence, file=sys.stderr, flush=True)

    def _stop(self, number: int, frame: FrameType | None) -> NoReturn:
        if self.by is not None and not self._lost:
            self._end_now()  # Asked twice: whoever asks does not want to wait.
        self.by, self._lost = signal.Signals(number).name, False
        raise Stopped

    def _unraisable(self, unraisable: sys.UnraisableHookArgs) -> None:
        """Python drops what is raised in a destructor or a callback; a stop is raised again."""
        if isinstance(unraisable.exc_value, Stopped):
            self._lost = True
        else:
            sys.__unraisablehook__(unraisable)

    def _watch(self, pipe: int) -> None:
        """Wait for signals, and end the process where one comes to nothing.

        Python runs handlers between its own instructions: never inside a long call into C.
        """
        while True:
            number = os.read(pipe, 1)[0]
            if number in SIGNALS and not self.elsewhere:
                asked = signal.Signals(number)
                break
        for _ in range(int(GRACE_SECONDS / _POLL_SECONDS)):
            if self._left.wait(_POLL_SECONDS):
                return
            if self._lost:
                _thread.interrupt_main(asked)
        self.by = self.by or asked.name
        self._end_now()

    def _end_now(self) -> NoReturn:
        self.say()
        os._exit(STOPPED)


_guard = _Guard()
