"""Errors as the user sees them: one sentence on stderr, and an exit code that means something."""

from __future__ import annotations

import typer

from normattn.errors import DivergedError, InputError, Interrupted, NormattnError
from normattn.io import FULL, os_error_in
from normattn.stopping import NO_THREAD
from normattn.terminal import warn

INPUT, DIVERGED, STOPPED = 2, 3, 130
# typer carries its own copy of click or uses the installed one, by version; ask it for the base.
_UsageError = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


def exit_code_of(error: BaseException) -> int | None:
    """Print the sentence for `error` and return its exit code; None for what nobody foresaw."""
    if isinstance(error, typer.Exit):
        return int(error.exit_code)
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        say("stopped; rerun the command to resume from the last saved state")
        return STOPPED
    if isinstance(error, _UsageError):
        return _usage(error)
    if isinstance(error, NormattnError):
        for note in getattr(error, "__notes__", ()):
            warn(note)
        say(str(error))
        return _code(error)
    if (lacking := _memory_error_in(error)) is not None:
        first = next(iter(str(lacking).splitlines()), "")
        why = f" ({first})" if first else ""
        say(f"out of memory{why}; take smaller batches, shorter texts or a smaller model")
        return INPUT
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        say(NO_THREAD)
        return INPUT
    refused = os_error_in(error)
    if refused is not None:
        say(_refusal(refused))
        return INPUT
    return None


def say(sentence: str) -> None:
    """One line on stderr, never wrapped: other programs read its last line."""
    warn("normattn: " + " ".join(sentence.split()))


def _code(error: NormattnError) -> int:
    if isinstance(error, Interrupted):
        return STOPPED
    if isinstance(error, DivergedError):
        return DIVERGED
    return INPUT if isinstance(error, InputError) else 1


def _usage(error: BaseException) -> int:
    """A mistake on the command line itself, found by the parser; no_args_is_help ends here too."""
    message = error.format_message() if hasattr(error, "format_message") else str(error)
    if type(error).__name__ == "NoArgsIsHelpError":
        print(message)
        return INPUT
    context = getattr(error, "ctx", None)
    where = context.command_path if context is not None else "normattn"
    say(f"{message.rstrip('.')} (see: {where} --help)")
    return INPUT


def _memory_error_in(error: BaseException) -> BaseException | None:
    """The refusal of memory behind an exception; None when there is none."""
    seen: BaseException | None = error
    while seen is not None:
        # torch's own are a RuntimeError, and a class of it, which is not imported for its name.
        named = any(kind.__name__ == "OutOfMemoryError" for kind in type(seen).__mro__)
        said = isinstance(seen, RuntimeError) and "can't allocate memory" in str(seen)
        said |= isinstance(seen, ImportError) and "failed to map segment" in str(seen)
        if isinstance(seen, MemoryError) or named or said:
            return seen
        seen = seen.__cause__
    return None


def _refusal(error: OSError) -> str:
    """What the operating system did not do, and for which file where it says so."""
    if error.errno in FULL:
        where = f" that holds {error.filename}" if error.filename else ""
        return f"no space left on the disk{where}; make room and rerun the command to resume"
    reason = error.strerror or str(error) or type(error).__name__
    return f"{error.filename}: {reason}" if error.filename else reason
