"""`normattn report`: tables and figures of whatever was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

EPILOG = """
**Examples**

`normattn report runs/kna runs/baseline --out runs/report`

`normattn report runs/keynorm-laptop` – tabulate a sweep again, into its own directory
"""


def command(
    runs: Annotated[
        list[Path], typer.Argument(help="Runs, or directories with runs somewhere below them.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="Where table.md, .csv, .json and figures/ go. [default: the first RUN]"),
    ] = None,
) -> None:
    """Tabulate and plot every evaluation below RUNS, with bootstrap confidence intervals.

    Runs that share documents are compared window by window (paired); seeds of one score are pooled.
    """
    from normattn.studies._tabulate import tabulate

    tabulate(runs, out or runs[0])
