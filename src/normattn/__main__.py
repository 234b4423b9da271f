"""The `normattn` command, also by `python -m normattn`: first the guard, then everything else."""

from __future__ import annotations

import os
import sys
import warnings

from normattn.stopping import run_stoppable


def main() -> None:
    """Run the command line of this process and exit; a signal at any time ends it in order."""
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


def _command() -> None:
    warnings.formatwarning = _sentence
    if not sys.stderr.isatty():
        # Bars of the libraries beneath would fill a log with their copies; read when tqdm comes.
        os.environ.setdefault("TQDM_DISABLE", "1")
    # Only here, under the guard: imports take long enough to be stopped in.
    from normattn.cli.app import main

    main()


if __name__ == "__main__":
    main()
