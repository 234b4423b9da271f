"""Commands that the program runs itself, as its own children."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def cell(directory: Path, parent: Annotated[int, typer.Argument()] = 0) -> None:
    """Train and evaluate the cell in `directory`; stop when the process `parent` is gone."""
    from normattn.studies import find
    from normattn.sweep.cell import run_cell

    code = run_cell(directory, find, parent)
    if code:
        raise typer.Exit(code)


def measure(directory: Path, parent: Annotated[int, typer.Argument()] = 0) -> None:
    """Time a few steps of the cell in `directory`, and print them as JSON."""
    from normattn.studies import find
    from normattn.sweep.rates import measure_cell

    measure_cell(directory, find, parent)
