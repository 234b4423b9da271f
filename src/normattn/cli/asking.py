"""An option of the command line, declared once: a field of a dataclass, with its help and checks.

`--help`, the parser and the code that does the work all read the same field.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

import typer

from normattn.io import expanded

Reader = Callable[[Any, str], Any]
_INFO, _READ, _TYPED, _SETTING = "info", "read", "typed", "setting"


def option(
    default: Any = ...,
    *flags: str,
    read: Reader | None = None,
    typed: Any = str | None,
    setting: str | None = None,
    **words: Any,
) -> Any:
    """A field that an option fills; required without a default.

    `flags` replace the option's name, `words` are those of `typer.Option`. `read` makes the value
    of what was typed (a `typed`) and the option's name; its field may be of any type. `setting` is
    the dotted name of the setting that the option stands for (see `settings`).
    """
    info = typer.Option(default, *flags, **words)
    return _field(info, default, {_READ: read, _TYPED: typed, _SETTING: setting})


def flag(name: str, help: str) -> Any:
    """A field that is True where the option `name` is given."""
    return option(False, name, help=help)


def argument(default: Any = ..., **words: Any) -> Any:
    """A field that an argument without a name fills; `words` are those of `typer.Argument`."""
    return _field(typer.Argument(default, **words), default, {})


def _field(info: Any, default: Any, metadata: dict[str, Any]) -> Any:
    whole, read = {_INFO: info, **metadata}, metadata.get(_READ)
    if default is ...:
        return dataclasses.field(metadata=whole)
    value = default if read is None or default is None else read(default, "the default")
    return dataclasses.field(default=value, metadata=whole)


def settings(options: Any) -> dict[str, Any]:
    """The settings that the options give, by dotted name."""
    given = {
        field.metadata.get(_SETTING): getattr(options, field.name)
        for field in dataclasses.fields(options)
    }
    return {name: value for name, value in given.items() if name and value is not None}


def told(work: Callable[[Any], int | None]) -> Callable[..., int | None]:
    """`work`, which takes one dataclass of options, as the function that typer makes a command of.

    Its parameters are the fields, its help is the dataclass's docstring.
    """
    (kind,) = (hint for name, hint in get_type_hints(work).items() if name != "return")

    def run(**typed: Any) -> int | None:
        return work(kind(**{field.name: _value(field, typed[field.name]) for field in fields}))

    fields, hints = dataclasses.fields(kind), get_type_hints(kind)
    run.__doc__ = kind.__doc__
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=field.metadata[_INFO],
                annotation=field.metadata[_TYPED]
                if field.metadata.get(_READ)
                else hints[field.name],
            )
            for field in fields
        ]
    )
    return run


def _value(field: dataclasses.Field[Any], typed: Any) -> Any:
    read, flags = field.metadata.get(_READ), field.metadata[_INFO].param_decls
    if read is not None and typed is not None:
        return read(typed, flags[0] if flags else f"--{field.name.replace('_', '-')}")
    if isinstance(typed, list):
        return [expanded(item) if isinstance(item, Path) else item for item in typed]
    return expanded(typed) if isinstance(typed, Path) else typed
