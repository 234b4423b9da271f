"""What every `normattn reproduce` command shares: its options, and how it runs a study."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from normattn.cli import values

GOES_ON = (
    "Stop it anywhere and run it again: it goes on, and ends in the same table to the last bit."
)

Preset = Annotated[str, typer.Option(help="smoke, laptop, gpu-…, or a TOML file of your own.")]
Seeds = Annotated[
    str | None,
    typer.Option(help="How many (3 means 0, 1, 2), or which (7,8). [default: the preset's]"),
]
Jobs = Annotated[
    int | None,
    typer.Option(
        min=1, help="Children at a time; changes no result. [default: a core each; 1 on a GPU]"
    ),
]
Out = Annotated[Path | None, typer.Option(help="[default: runs/STUDY-PRESET]", show_default=False)]
Corpus = Annotated[
    str | None,
    typer.Option(help="Another corpus: a file or folder, hf:NAME. [default: its own]"),
]
Changes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Any setting, as training.steps=100."),
]
Plan = Annotated[bool, typer.Option("--plan", help="Print the plan and stop.")]


# The modules are named after what they do: `continue` is a word of Python.
_MODULES = {"continue": "continued"}


def changes_of(corpus: str | None, changes: list[str] | None) -> dict[str, Any]:
    """--corpus and every --set, by the dotted name of the setting."""
    assigned = values.assignments(changes or [])
    return {**({"training.data.corpus": corpus} if corpus else {}), **assigned}


def run_study(study: str, only_plan: bool, **request: Any) -> None:
    """Do what the study of that name makes of the request; exit with 2 where a cell failed."""
    from importlib import import_module

    from normattn.recipes.studies import Request
    from normattn.recipes.sweep import reproduce

    module = _MODULES.get(study, study)
    resolve = import_module(f"normattn.recipes.{module}").resolve
    if reproduce(resolve, Request(**request), only_plan=only_plan):
        raise typer.Exit(2)
