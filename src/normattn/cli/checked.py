"""What no command of ours is given: an empty name, a name that is no text, a number without end.

Checked once, for every command, before any of them begins.
"""

from __future__ import annotations

import math
from typing import Any

import typer
from typer.core import TyperCommand

from normattn.errors import InputError


class Checked(TyperCommand):
    """A command whose arguments are text that is not empty, and numbers that a machine holds."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As typer does, after a look at every argument as it was typed."""
        names = {name for parameter in self.params for name in parameter.opts}
        for number, argument in enumerate(args, start=1):
            # A value may end in "=", as a setting that is emptied, or base64.
            if not argument or (argument.endswith("=") and argument[:-1] in names):
                # As a path it would mean the current directory.
                before = args[number - 2] if number > 1 and not argument else argument
                raise InputError(
                    f"{ctx.command_path}: argument {number} is empty (near {before!r}); "
                    "leave it out, or say what it should be"
                )
            if any("\ud800" <= letter <= "\udfff" for letter in argument):
                raise InputError(
                    f"{ctx.command_path}: argument {number}, {argument!r}, is not text in this "
                    "system's encoding; rename the file, or quote it as text"
                )
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """As typer does, after a look at every number."""
        for parameter in self.params:
            given = ctx.params.get(parameter.name)
            for value in given if isinstance(given, list | tuple) else [given]:
                _refuse_number(value, parameter.opts[0])
        return super().invoke(ctx)


def _refuse_number(value: Any, name: str) -> None:
    if isinstance(value, int) and value.bit_length() > 63:
        raise InputError(f"{name} must be a whole number of at most 63 bits")
    if isinstance(value, float) and not math.isfinite(value):
        raise InputError(f"{name} must be a finite number, got {value}")


class Commands(typer.Typer):
    """A group of such commands."""

    def command(self, name: str | None = None, **options: Any) -> Any:
        """As typer's, with the checks."""
        return super().command(name, **{"cls": Checked, **options})
