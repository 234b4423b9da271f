"""Options of the command line: fields of dataclasses, the values that they take, and checks.

An option is declared once. `--help`, the parser and the code that does the work read its field.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, get_type_hints

import typer
from typer.core import TyperCommand

from normattn.errors import InputError
from normattn.io import expand_path
from normattn.settings import parse_value

MOST_SEEDS = 100
"""A larger number is far more likely a seed of that name than a count."""


def option(
    default: Any = ...,
    *flags: str,
    read: Callable[[Any, str], Any] | None = None,
    typed: Any = str | None,
    setting: str | None = None,
    **words: Any,
) -> Any:
    """A field that an option fills; required without a default.

    `flags` replace the option's name, `words` are those of `typer.Option`. `read` makes the value
    of what was typed (a `typed`) and the option's name; its field may be of any type. `setting` is
    the dotted name of the setting that the option gives (see `settings`).
    """
    info = typer.Option(default, *flags, **words)
    return _field(info, default, {"read": read, "typed": typed, "setting": setting})


def settings_option(help: str) -> Any:
    """A field that `--set KEY=VALUE`, given as often as is wanted, fills; None without any."""
    return option(
        None,
        "--set",
        read=assignments,
        typed=list[str] | None,
        metavar="KEY=VALUE",
        help=help,
    )


def flag(name: str, help: str) -> Any:
    """A field that is True where the option `name` is given."""
    return option(False, name, help=help)


def argument(default: Any = ..., **words: Any) -> Any:
    """A field that an argument without a name fills; `words` are those of `typer.Argument`."""
    return _field(typer.Argument(default, **words), default, {})


def _field(info: Any, default: Any, metadata: dict[str, Any]) -> Any:
    whole, read = {"info": info, **metadata}, metadata.get("read")
    if default is ...:
        return dataclasses.field(metadata=whole)
    value = default if read is None or default is None else read(default, "the default")
    return dataclasses.field(default=value, metadata=whole)


def settings(options: Any) -> dict[str, Any]:
    """The settings that options and `--set` give, by dotted name; `InputError` where both do."""
    from normattn.lab.sweep.config import merged, value_at  # Slow to import, and `--help` is quick.

    given = {
        str(field.metadata["setting"]): getattr(options, field.name)
        for field in dataclasses.fields(options)
        if field.metadata.get("setting") and getattr(options, field.name) is not None
    }
    assigned = options.changes or {}
    both = [name for name in given if value_at(merged({}, assigned), name) is not None]
    if both:
        raise InputError(f"{', '.join(sorted(both))} is given both as an option and by --set")
    return {**given, **assigned}


def command_of(kind: type[Any], work: Callable[[Any], int | None]) -> Callable[..., int | None]:
    """`work`, which takes a dataclass of options, as the function that typer makes a command of.

    Its parameters are the fields, its help is the dataclass's docstring.
    """
    fields, hints = dataclasses.fields(kind), get_type_hints(kind)

    def run(**typed: Any) -> int | None:
        return work(kind(**{field.name: _value(field, typed[field.name]) for field in fields}))

    run.__doc__ = kind.__doc__
    parameters = []
    for field in fields:
        read = field.metadata.get("read")
        annotation = field.metadata["typed"] if read else hints[field.name]
        parameters.append(
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=field.metadata["info"],
                annotation=annotation,
            )
        )
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


def _value(field: dataclasses.Field[Any], typed: Any) -> Any:
    read, flags = field.metadata.get("read"), field.metadata["info"].param_decls
    if read is not None and typed is not None:
        return read(typed, flags[0] if flags else f"--{field.name.replace('_', '-')}")
    if isinstance(typed, list):
        return [expand_path(item) if isinstance(item, Path) else item for item in typed]
    return expand_path(typed) if isinstance(typed, Path) else typed


class CheckedCommand(TyperCommand):
    """A command that refuses an empty argument, one that is not text, and an unbounded number."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse as typer does, after a look at every argument."""
        names = {name for parameter in self.params for name in parameter.opts}
        for number, argument in enumerate(args, start=1):
            where = f"{ctx.command_path}: argument {number}"
            # A value may end in "=", as a setting that is emptied, or base64. An empty one would
            # mean the current directory where a path is expected.
            if not argument or (argument.endswith("=") and argument[:-1] in names):
                before = args[number - 2] if number > 1 and not argument else argument
                raise InputError(f"{where} is empty (near {before!r}); leave it out, or fill it in")
            if any("\ud800" <= letter <= "\udfff" for letter in argument):
                raise InputError(f"{where}, {argument!r}, is not text in this system's encoding")
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Invoke as typer does, after a look at every number."""
        for parameter in self.params:
            given, name = ctx.params.get(parameter.name), parameter.opts[0]
            for value in given if isinstance(given, list | tuple) else [given]:
                if isinstance(value, int) and value.bit_length() > 63:
                    raise InputError(f"{name} must be a whole number of at most 63 bits")
                if isinstance(value, float) and not math.isfinite(value):
                    raise InputError(f"{name} must be a finite number, got {value}")
        return super().invoke(ctx)


# Values as they are typed.


def names(text: str, option: str) -> tuple[str, ...]:
    """`"KNA, QNA"` as two names; an empty or doubled name is refused."""
    parts = tuple(part.strip() for part in text.split(","))
    if not all(parts):
        raise InputError(f"{option} holds an empty name in {text!r}; separate names by commas")
    if len(set(parts)) != len(parts):
        raise InputError(f"{option} names something twice: {text}")
    return parts


def integers(text: str, option: str, least: int = 1) -> tuple[int, ...]:
    """`"1,2,4"` as whole numbers, each at least `least`; a closing comma is allowed."""
    parts = [part.strip() for part in text.rstrip(", ").split(",")]
    # Nineteen digits hold every number of 63 bits; longer ones cost time before they are refused.
    if not all(part.isdecimal() and len(part) < 20 and int(part) >= least for part in parts):
        raise InputError(f"{option} takes whole numbers of at least {least}, got {text!r}")
    numbers = tuple(int(part) for part in parts)
    if max(numbers) >= 1 << 63:
        raise InputError(f"{option} takes whole numbers of at most 63 bits, got {text!r}")
    return numbers


def token_counts(text: str, option: str) -> tuple[int, ...]:
    """`"8k,12000"` as (8192, 12000), ascending; k is 1024."""
    counts = []
    for part in (part.strip() for part in text.split(",")):
        match = re.fullmatch(r"([0-9]{1,9})([kK]?)", part)
        count = int(match[1]) * (1024 if match[2] else 1) if match else 0
        if count < 2:
            raise InputError(
                f"{option} takes numbers of tokens separated by commas, such as 8k,16k,32000 (8k "
                f"is 8192), but it has {part!r} in {text!r}"
            )
        counts.append(count)
    if len(set(counts)) < len(counts):
        raise InputError(f"{option} names a length twice: {text}")
    return tuple(sorted(counts))


def seeds(text: str, option: str = "--seeds") -> tuple[int, ...]:
    """`"3"` is how many (0, 1, 2); `"7,8"` or `"7,"` says which."""
    numbers = integers(text, option, least=0)
    if "," in text:
        if len(set(numbers)) != len(numbers):
            raise InputError(f"{option} names a seed twice: {text}")
        return numbers
    if not 1 <= numbers[0] <= MOST_SEEDS:
        raise InputError(
            f"{option} takes a number of seeds (at least 1, at most {MOST_SEEDS}) or a list such "
            f"as 7,8 (of one: 7,), got {text}"
        )
    return tuple(range(numbers[0]))


def assignments(texts: Iterable[str], option: str = "--set") -> dict[str, Any]:
    """`["model.dim=64"]` as `{"model.dim": 64}`; a value is read as TOML, else as plain text."""
    assigned: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not all(part.strip() for part in key.split(".")):
            raise InputError(f"{option} takes key=value, as in {option} model.dim=64, got {text!r}")
        if key.strip() in assigned:
            raise InputError(f"{option} gives {key.strip()} twice")
        assigned[key.strip()] = parse_value(value.strip(), f"{option} {key.strip()}")
    return assigned
