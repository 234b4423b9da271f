"""Settings: their base class, their text on the command line, and how two records differ."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from normattn.errors import InputError
from normattn.io import parse_toml

_ABSENT = object()


class Settings(BaseModel):
    """Base of every group of settings: frozen; refuses an unknown field, and true for a number."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _refuse_truth_for_a_number(cls, values: Any) -> Any:
        for name, value in values.items() if isinstance(values, dict) else ():
            if _holds_truth(value) and name in _numbers(cls):
                raise ValueError(f"{name}: expected a number, not true or false")
        return values


def _holds_truth(value: Any) -> bool:
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, list | tuple):
        return any(map(_holds_truth, value))
    return isinstance(value, bool)


@cache
def _numbers(model: type[BaseModel]) -> frozenset[str]:
    """The fields that hold numbers and for which true is no value."""
    types = {name: set(_types(field.annotation)) for name, field in model.model_fields.items()}
    return frozenset(n for n, of in types.items() if of & {int, float} and not of & {bool, Any})


def _types(annotation: Any) -> Iterator[Any]:
    """The types that a type is made of, itself among them."""
    yield annotation
    for part in get_args(annotation):
        yield from _types(part)


def explain(error: ValidationError) -> str:
    """The first thing that is wrong, as one sentence with the dotted field."""
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    message, given = str(first["msg"]).removeprefix("Value error, "), first["input"]
    if first["type"] == "missing":
        return f"{where} is missing"
    if first["type"] == "extra_forbidden":
        return f"{where}: there is no such setting"
    if isinstance(given, str | int | float) and repr(given) not in message:
        message = f"{message}, got {given!r}"
    return f"{where}: {message}" if where else message


def read_typed(text: str, source: str) -> Any:
    """Parse a setting's text: as TOML, as none or null, else as the text itself.

    Raises `InputError` for TOML that is nested too deep or has a number of thousands of digits.
    """
    if text in ("none", "null"):
        return None
    try:
        table = parse_toml(f"value = {text}", source)
    except InputError as error:
        if isinstance(error.__cause__, tomllib.TOMLDecodeError):
            return text
        raise
    return table["value"] if table.keys() == {"value"} else text


def typed(name: str, value: Any) -> list[str]:
    """Format `name=value` as on the command line: `read_typed` gives the value again.

    A group of settings becomes one text for each of them.
    """
    if isinstance(value, Mapping) and value:
        return [line for key, inner in value.items() for line in typed(f"{name}.{key}", inner)]
    if isinstance(value, str) and value.strip() == value and read_typed(value, name) == value:
        return [f"{name}={value}"]
    return [f"{name}={'none' if value is None else _as_toml(value)}"]


def _as_toml(value: Any) -> str:
    """A value within one line of TOML, whose strings and numbers are those of JSON."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_as_toml(k)} = {_as_toml(v)}' for k, v in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_as_toml, value))}]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def refuse_beyond(values: Any, where: str, name: str = "") -> None:
    """Raise `InputError`, naming the setting, for an integer of more than 63 bits."""
    if isinstance(values, Mapping):
        for key, value in values.items():
            refuse_beyond(value, where, f"{name}.{key}" if name else str(key))
    elif isinstance(values, list | tuple):
        for value in values:
            refuse_beyond(value, where, name)
    elif isinstance(values, int) and values.bit_length() > 63:
        digits = f"about 10^{round(values.bit_length() * 0.30103)}"
        raise InputError(f"{where}: {name} must be a number of at most 63 bits, got {digits}")


def first_difference(
    stored: Any, wanted: Any, ignored: frozenset[str] = frozenset()
) -> tuple[str, str, str] | None:
    """Find the first dotted field in which two JSON values differ, with both values as text."""
    return next(differences(stored, wanted, ignored), None)


def differences(
    stored: Any, wanted: Any, ignored: frozenset[str] = frozenset(), prefix: str = ""
) -> Iterator[tuple[str, str, str]]:
    """Every dotted field in which two JSON values differ, with both values as text."""
    if isinstance(stored, dict) and isinstance(wanted, dict):
        for key in [*wanted, *(key for key in stored if key not in wanted)]:
            name = f"{prefix}.{key}" if prefix else key
            if name not in ignored:
                pair = stored.get(key, _ABSENT), wanted.get(key, _ABSENT)
                yield from differences(*pair, ignored, name)
    # In Python, True == 1; in a configuration they differ.
    elif stored != wanted or (type(stored) is bool) != (type(wanted) is bool):
        yield prefix, _shown(stored), _shown(wanted)


def _shown(value: Any) -> str:
    return "absent" if value is _ABSENT else repr(value)
