"""Errors of the command line: one sentence on stderr, and an exit code."""

from __future__ import annotations

import typer

from normattn.errors import DivergedError, InputError, Interrupted, NormattnError
from normattn.io import DISK_FULL, os_error_in
from normattn.stopping import NO_THREAD
from normattn.terminal import warn

INPUT, DIVERGED, STOPPED = 2, 3, 130
_MEMORY_PHRASES: dict[type, tuple[str, ...]] = {
    RuntimeError: ("not enough memory", "out of memory", "can't allocate memory"),
    ImportError: ("failed to map segment",),
}
# Depending on its version, typer uses its own copy of click or the installed one.
_UsageError = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


def exit_code_of(error: BaseException) -> int | None:
    """Print a sentence for `error` and return its exit code; None for an unexpected error."""
    if isinstance(error, typer.Exit):
        return int(error.exit_code)
    code = INPUT
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        code = STOPPED
        sentence = "stopped; rerun the command to resume from the last saved state"
    elif isinstance(error, _UsageError):
        message = error.format_message() if hasattr(error, "format_message") else str(error)
        if type(error).__name__ == "NoArgsIsHelpError":
            print(message)
            return INPUT
        message = message.replace("Value error, ", "").rstrip(".")  # from pydantic
        context = getattr(error, "ctx", None)
        where = context.command_path if context is not None else "normattn"
        sentence = f"{message} (see: {where} --help)"
    elif isinstance(error, NormattnError):
        codes = {Interrupted: STOPPED, DivergedError: DIVERGED, InputError: INPUT}
        code = next((code for kind, code in codes.items() if isinstance(error, kind)), 1)
        sentence = str(error)
    else:
        described = _describe_system_error(error)
        if described is None:
            return None
        sentence = described
    warn("normattn: " + " ".join(sentence.split()))  # one line: programs read the last one
    return code


def _describe_system_error(error: BaseException) -> str | None:
    """A sentence for an error of memory, threads or files; None for other errors."""
    memory_error = memory_error_in(error)
    if memory_error is not None:
        first_line = next(iter(str(memory_error).splitlines()), "")
        reason = f" ({first_line})" if first_line else ""
        return f"out of memory{reason}; take smaller batches, shorter texts or a smaller model"
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        return NO_THREAD
    os_error = os_error_in(error)
    if os_error is None:
        return None
    if os_error.errno in DISK_FULL:
        where = f" that holds {os_error.filename}" if os_error.filename else ""
        return f"no space left on the disk{where}; make room and rerun the command to resume"
    reason = os_error.strerror or str(os_error) or type(os_error).__name__
    return f"{os_error.filename}: {reason}" if os_error.filename else reason


def memory_error_in(error: BaseException) -> BaseException | None:
    """Return the out-of-memory error that caused an exception, or None."""
    cause: BaseException | None = error
    while cause is not None:
        # By name, so that torch is not imported. Some of its errors are plain RuntimeErrors.
        names = {kind.__name__ for kind in type(cause).__mro__}
        phrases = _MEMORY_PHRASES.get(type(cause), ())
        if names & {"OutOfMemoryError", "MemoryError"} or any(
            phrase in str(cause).lower() for phrase in phrases
        ):
            return cause
        cause = cause.__cause__
    return None
