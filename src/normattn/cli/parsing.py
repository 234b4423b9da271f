"""Options of the command line as dataclass fields, from which `--help` and the parser are made."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, get_type_hints

import typer
from typer.core import TyperCommand

from normattn.errors import InputError
from normattn.io import expand_path
from normattn.settings import parse_value

MAX_SEEDS = 100
"""A larger number is more likely a seed than a count."""


def option(
    default: Any,
    help: str = "",
    *,
    flag: str | None = None,
    read: Callable[[Any, str], Any] | None = None,
    typed: Any = str | None,
    setting: str | None = None,
    **kwargs: Any,
) -> Any:
    """Return a dataclass field that is an option; required where the default is `...`.

    `flag` replaces the option's name, `kwargs` are those of `typer.Option`. `read(text, name)`
    converts what was typed (of type `typed`) to the field's value.
    """
    info = typer.Option(default, *([flag] if flag else []), help=help or None, **kwargs)
    metadata = {"info": info, "read": read, "typed": typed, "setting": setting}
    if default is ...:
        return dataclasses.field(metadata=metadata)
    value = default if read is None or default is None else read(default, "the default")
    return dataclasses.field(default=value, metadata=metadata)


def setting(name: str, help: str, **kwargs: Any) -> Any:
    """Return a field for an option that sets the dotted setting `name` (see `settings`)."""
    return option(None, help, setting=name, **kwargs)


def settings_option(help: str) -> Any:
    """Return a field for `--set KEY=VALUE`, which may be repeated; None if absent."""
    typed = list[str] | None
    return option(None, help, flag="--set", read=assignments, typed=typed, metavar="KEY=VALUE")


def flag(name: str, help: str) -> Any:
    """Return a field that is True if the option `name` is given."""
    return option(False, help, flag=name)


def argument(default: Any = dataclasses.MISSING, **kwargs: Any) -> Any:
    """Return a field for a positional argument; `kwargs` are those of `typer.Argument`."""
    info = typer.Argument(... if default is dataclasses.MISSING else default, **kwargs)
    return dataclasses.field(default=default, metadata={"info": info})


def settings(options: Any) -> dict[str, Any]:
    """Return the settings of options and `--set` by dotted name; `InputError` if both set one."""
    from normattn.lab.sweep.config import merged, value_at  # Slow to import; `--help` must be fast.

    from_options = {
        str(field.metadata["setting"]): getattr(options, field.name)
        for field in dataclasses.fields(options)
        if field.metadata.get("setting") and getattr(options, field.name) is not None
    }
    assigned = options.changes or {}
    both = [name for name in from_options if value_at(merged({}, assigned), name) is not None]
    if both:
        raise InputError(f"{', '.join(sorted(both))} is given both as an option and by --set")
    return {**from_options, **assigned}


def make_command(
    options_class: type[Any], run: Callable[[Any], int | None]
) -> Callable[..., int | None]:
    """Return the typer command of a dataclass of options, which it passes to `run`."""
    fields, hints = dataclasses.fields(options_class), get_type_hints(options_class)

    def command(**typed: Any) -> int | None:
        values = {}
        for field in fields:
            value = typed[field.name]
            read, flags = field.metadata.get("read"), field.metadata["info"].param_decls
            if read is not None and value is not None:
                value = read(value, flags[0] if flags else f"--{field.name.replace('_', '-')}")
            elif isinstance(value, list):
                value = [expand_path(item) if isinstance(item, Path) else item for item in value]
            elif isinstance(value, Path):
                value = expand_path(value)
            values[field.name] = value
        return run(options_class(**values))

    command.__doc__ = options_class.__doc__
    parameters = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.metadata["info"],
            annotation=field.metadata["typed"] if field.metadata.get("read") else hints[field.name],
        )
        for field in fields
    ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command


class CheckedCommand(TyperCommand):
    """A command that raises for empty arguments, invalid text, and numbers out of range."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Check every argument, then parse as typer does."""
        names = {name for parameter in self.params for name in parameter.opts}
        for number, argument in enumerate(args, start=1):
            where = f"{ctx.command_path}: argument {number}"
            # A value may end in "=", such as an empty setting or base64. An empty path would be the
            # current directory.
            if not argument or (argument.endswith("=") and argument[:-1] in names):
                before = args[number - 2] if number > 1 and not argument else argument
                raise InputError(f"{where} is empty (near {before!r}); leave it out, or fill it in")
            if any("\ud800" <= letter <= "\udfff" for letter in argument):
                raise InputError(f"{where}, {argument!r}, is not text in this system's encoding")
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Check every number, then invoke as typer does."""
        for parameter in self.params:
            value = ctx.params.get(parameter.name)
            if isinstance(value, int | float) and not abs(value) < 1 << 63:  # NaN is not below.
                raise InputError(f"{parameter.opts[0]} is not finite or more than 63 bits")
        return super().invoke(ctx)


def names(text: str, option: str) -> tuple[str, ...]:
    """Parse `"KNA, QNA"` as two names; `InputError` for an empty or repeated name."""
    parts = tuple(part.strip() for part in re.split(r",(?![^(]*\))", text))
    if not all(parts):
        raise InputError(f"{option} holds an empty name in {text!r}; separate names by commas")
    if len(set(parts)) != len(parts):
        raise InputError(f"{option} names something twice: {text}")
    return parts


def integers(text: str, option: str, minimum: int = 1) -> tuple[int, ...]:
    """Parse `"1,2,4"` as integers of at least `minimum`; a trailing comma is allowed."""
    parts = [part.strip() for part in text.rstrip(", ").split(",")]
    # Converting very long numbers takes time.
    if not all(part.isdecimal() and len(part) < 19 and int(part) >= minimum for part in parts):
        raise InputError(
            f"{option} takes whole numbers of at least {minimum} (at most 18 digits), got {text!r}"
        )
    return tuple(int(part) for part in parts)


def token_counts(text: str, option: str) -> tuple[int, ...]:
    """Parse `"8k,12000"` as (8192, 12000), sorted; k is 1024."""
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
    """Parse `"3"` as the seeds 0, 1, 2, and `"7,8"` or `"7,"` as a list."""
    numbers = integers(text, option, minimum=0)
    if "," in text:
        if len(set(numbers)) != len(numbers):
            raise InputError(f"{option} names a seed twice: {text}")
        return numbers
    if not 1 <= numbers[0] <= MAX_SEEDS:
        raise InputError(
            f"{option} takes a number of seeds (at least 1, at most {MAX_SEEDS}) or a list such "
            f"as 7,8 (of one: 7,), got {text}"
        )
    return tuple(range(numbers[0]))


def assignments(texts: Iterable[str], option: str = "--set") -> dict[str, Any]:
    """Parse `["model.dim=64"]` as `{"model.dim": 64}`; a value is TOML, else plain text."""
    assigned: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not all(part.strip() for part in key.split(".")):
            raise InputError(f"{option} takes key=value, as in {option} model.dim=64, got {text!r}")
        if key.strip() in assigned:
            raise InputError(f"{option} gives {key.strip()} twice")
        assigned[key.strip()] = parse_value(value.strip(), f"{option} {key.strip()}")
    return assigned
