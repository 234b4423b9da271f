"""The `normattn` command, also by `python -m normattn`: first the guard, then everything else."""

from __future__ import annotations

import os
import sys
import warnings

from normattn.stopping import run_stoppable

LEAST_ADDRESS_SPACE = 1_500_000_000
"""Bytes that the libraries need; with less, OpenBLAS hangs or aborts while it loads."""
LIGHT = {"-h", "--help", "--version"}


def main() -> None:
    """Run the command line of this process and exit; a signal at any time ends it in order."""
    _refuse_lost_places()
    _refuse_little_memory()
    run_stoppable(_command)


def _sentence(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    line: str | None = None,
) -> str:
    """A warning as the user reads it: no file of ours, no line of its code."""
    from normattn.terminal import visible

    return f"warning: {visible(str(message))}\n"


def _refuse_little_memory() -> None:
    """End by a sentence where a limit of address space would stop the libraries halfway."""
    if len(sys.argv) == 1 or LIGHT & {*sys.argv} or sys.platform == "win32":
        return
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and limit < LEAST_ADDRESS_SPACE:
        print(
            f"normattn: too little memory: the address space is limited to {limit / 1e6:,.0f} MB, "
            f"and at least {LEAST_ADDRESS_SPACE / 1e6:,.0f} MB are needed (ulimit -v)",
            file=sys.stderr,
        )
        sys.exit(2)


def _refuse_lost_places() -> None:
    """End by a sentence where there is nowhere to print, or no working directory any more.

    A closed stream is replaced before any file is opened, which would take its number.
    """
    closed = []
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            closed.append(name)
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
            stream = open(number, "r" if number == 0 else "w", closefd=False)  # noqa: SIM115  # stays
            setattr(sys, name, stream)
    sentence = None
    if "stdout" in closed:
        sentence = "standard output is closed: redirect it to a file, or to /dev/null"
    try:
        os.getcwd()
    except OSError as error:
        sentence = f"the working directory cannot be used ({error.strerror}): change to another"
    if sentence is not None:
        print(f"normattn: {sentence}", file=sys.stderr)
        sys.exit(2)


def _command() -> None:
    warnings.formatwarning = _sentence
    if not sys.stderr.isatty():
        # Bars of the libraries beneath would fill a log with their copies; read when tqdm comes.
        os.environ.setdefault("TQDM_DISABLE", "1")
    try:
        # Only here, under the guard: imports take long enough to be stopped in.
        from normattn.cli.app import main
    except MemoryError:
        print("normattn: out of memory before the command began", file=sys.stderr)
        sys.exit(2)
    main()


if __name__ == "__main__":
    main()
