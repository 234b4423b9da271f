"""The `normattn` command, also `python -m normattn`. Signal handlers come before other imports."""

from __future__ import annotations

import os
import sys
import warnings

from normattn.stopping import run_stoppable


def main() -> None:
    """Run the command line and exit. A signal ends it with one message."""
    _check_process()
    run_stoppable(_command)


def _format_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    line: str | None = None,
) -> str:
    """Format a warning without file name and source line."""
    from normattn.terminal import visible

    return f"warning: {visible(str(message))}\n"


def _check_process() -> None:
    """Exit with a message if an output is closed or the working directory is gone.

    The files opened next would get the descriptor of the output, and MKL aborts without a folder.
    """
    message = None
    if sys.stdout is None or sys.stderr is None:
        message = "an output is closed: redirect it to a file, or to /dev/null"
    try:
        os.getcwd()
    except OSError as error:
        message = f"the working directory cannot be used ({error.strerror}): change to another"
    if message is not None:
        print(f"normattn: {message}", file=sys.stderr or sys.stdout)
        sys.exit(2)


def _command() -> None:
    warnings.formatwarning = _format_warning
    if not sys.stderr.isatty():
        # Progress bars of libraries would fill a log. Read when tqdm is imported.
        os.environ.setdefault("TQDM_DISABLE", "1")
    try:
        # Imported here, after the signal handlers: imports take long enough to be interrupted.
        from normattn.cli.app import main
    except MemoryError:
        print("normattn: out of memory before the command began", file=sys.stderr)
        sys.exit(2)
    main()


if __name__ == "__main__":
    main()
