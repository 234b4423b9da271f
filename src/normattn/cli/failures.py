"""Errors as the user sees them: one sentence on stderr, and an exit code that means something."""

from __future__ import annotations

import errno
import sys

import typer

from normattn.errors import DivergedError, InputError, Interrupted, NormattnError

INPUT, DIVERGED, STOPPED = 2, 3, 130
# typer carries its own copy of click or uses the installed one, by version; ask it for the base.
_UsageError = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


def exit_code_of(error: BaseException) -> int | None:
    """Print the sentence for `error` and return its exit code; None for what nobody foresaw."""
    if isinstance(error, typer.Exit):
        return int(error.exit_code)
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        say("stopped; the same command goes on from the last saved state")
        return STOPPED
    if isinstance(error, _UsageError):
        return _usage(error)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        say(f"no space left on the disk{_place(error)}; make room, and the same command goes on")
        return INPUT
    if isinstance(error, NormattnError):
        say(str(error))
        return _code(error)
    return None


def say(sentence: str) -> None:
    """One line on stderr, never wrapped: other programs read its last line."""
    print("normattn: " + " ".join(sentence.split()), file=sys.stderr, flush=True)


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


def _place(error: OSError) -> str:
    return f" that holds {error.filename}" if error.filename else ""
