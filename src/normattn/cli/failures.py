"""Errors as the user sees them: one sentence on stderr, and an exit code that means something."""

from __future__ import annotations

import typer

from normattn.errors import DivergedError, InputError, Interrupted, NormattnError
from normattn.io import DISK_FULL, os_error_in
from normattn.stopping import NO_THREAD
from normattn.terminal import warn

INPUT, DIVERGED, STOPPED = 2, 3, 130
_MEMORY_WORDS: dict[type, tuple[str, ...]] = {
    RuntimeError: ("not enough memory", "out of memory", "can't allocate memory"),
    ImportError: ("failed to map segment",),
}
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
        codes = {Interrupted: STOPPED, DivergedError: DIVERGED, InputError: INPUT}
        return next((code for kind, code in codes.items() if isinstance(error, kind)), 1)
    sentence = _refusal(error)
    if sentence is None:
        return None
    say(sentence)
    return INPUT


def say(sentence: str) -> None:
    """One line on stderr, never wrapped: other programs read its last line."""
    warn("normattn: " + " ".join(sentence.split()))


def _usage(error: BaseException) -> int:
    """A mistake on the command line itself, found by the parser; no_args_is_help ends here too."""
    message = error.format_message() if hasattr(error, "format_message") else str(error)
    if type(error).__name__ == "NoArgsIsHelpError":
        print(message)
        return INPUT
    message = message.replace("Value error, ", "")  # of the library that typer checks values by
    context = getattr(error, "ctx", None)
    where = context.command_path if context is not None else "normattn"
    say(f"{message.rstrip('.')} (see: {where} --help)")
    return INPUT


def _refusal(error: BaseException) -> str | None:
    """What the operating system or a library did not do: memory, threads, files."""
    lacking = memory_error_in(error)
    if lacking is not None:
        first = next(iter(str(lacking).splitlines()), "")
        why = f" ({first})" if first else ""
        return f"out of memory{why}; take smaller batches, shorter texts or a smaller model"
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        return NO_THREAD
    refused = os_error_in(error)
    if refused is None:
        return None
    if refused.errno in DISK_FULL:
        where = f" that holds {refused.filename}" if refused.filename else ""
        return f"no space left on the disk{where}; make room and rerun the command to resume"
    reason = refused.strerror or str(refused) or type(refused).__name__
    return f"{refused.filename}: {reason}" if refused.filename else reason


def memory_error_in(error: BaseException) -> BaseException | None:
    """The refusal of memory behind an exception; None when there is none."""
    seen: BaseException | None = error
    while seen is not None:
        # torch's own is a class that is not imported for its name, or a plain RuntimeError.
        named = {kind.__name__ for kind in type(seen).__mro__} & {"OutOfMemoryError", "MemoryError"}
        words = _MEMORY_WORDS.get(type(seen), ())
        if named or any(each in str(seen).lower() for each in words):
            return seen
        seen = seen.__cause__
    return None
