"""The `normattn` command, also `python -m normattn`. Signal handlers come before other imports."""

from __future__ import annotations

import os
import sys
import warnings

from normattn.stopping import run_stoppable

MIN_ADDRESS_SPACE = 1_500_000_000
"""Bytes that the libraries need. With less, OpenBLAS hangs or aborts while loading."""
INFO_OPTIONS = {"-h", "--help", "--version"}


def main() -> None:
    """Run the command line and exit. A signal ends it with one message."""
    _check_streams()
    _check_address_space()
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


def _check_address_space() -> None:
    if len(sys.argv) == 1 or INFO_OPTIONS & {*sys.argv} or sys.platform == "win32":
        return
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and limit < MIN_ADDRESS_SPACE:
        print(
            f"normattn: too little memory: the address space is limited to {limit / 1e6:,.0f} MB, "
            f"and at least {MIN_ADDRESS_SPACE / 1e6:,.0f} MB are needed (ulimit -v)",
            file=sys.stderr,
        )
        sys.exit(2)


def _check_streams() -> None:
    """Exit with a message if stdout is closed or the working directory is gone.

    Closed streams are replaced before a file is opened, which would get their file descriptors.
    """
    closed = []
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            closed.append(name)
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free descriptor: this one
            stream = open(number, "r" if number == 0 else "w", closefd=False)  # noqa: SIM115  # stays
            setattr(sys, name, stream)
    message = None
    if "stdout" in closed:
        message = "standard output is closed: redirect it to a file, or to /dev/null"
    try:
        os.getcwd()
    except OSError as error:
        message = f"the working directory cannot be used ({error.strerror}): change to another"
    if message is not None:
        print(f"normattn: {message}", file=sys.stderr)
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
