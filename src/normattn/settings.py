"""Settings: their base class, their text on the command line, and how two records differ."""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from normattn.errors import InputError
from normattn.io import parse_toml

_ABSENT = object()
Group = TypeVar("Group", bound="Settings")


class Settings(BaseModel):
    """Base of every group of settings: frozen; refuses an unknown field, and true for a number."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @classmethod
    def parse(
        cls: type[Group], values: Mapping[str, Any], source: str = "the configuration"
    ) -> Group:
        """The group with these values; `InputError` names the field in `source` and what is wrong.

        Of an unknown field it names the nearest.
        """
        values = cls.of_this_version(values)
        _refuse_unknown(values, cls, source)
        _refuse_beyond(values, source)
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise InputError(f"{source}: {explain(error)}") from error

    @classmethod
    def of_this_version(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """The values of an earlier version in the words of this one."""
        return dict(values)

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


def _refuse_unknown(values: Mapping[str, Any], model: type[BaseModel], source: str) -> None:
    """Raise `InputError` for the first field that `model` does not have, naming the nearest."""
    known = list(dict.fromkeys(_fields(model)))
    for name in _given(values, known):
        if name in known:
            continue
        group, _, last = name.rpartition(".")
        siblings = [field for field in known if field.rpartition(".")[0] == group]
        elsewhere = [field for field in known if field.rpartition(".")[2] == last]
        near = difflib.get_close_matches(name, siblings, n=1, cutoff=0.6) or elsewhere[:1]
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(siblings)}"
        raise InputError(f"{source}: unknown field {name}; {hint}")


def _fields(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every dotted field of a group of settings, through unions of groups."""
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}"
        # The keys of a dictionary are no fields.
        parts = () if get_origin(field.annotation) is dict else _types(field.annotation)
        for part in parts:
            if isinstance(part, type) and issubclass(part, BaseModel):
                yield from _fields(part, f"{prefix}{name}.")


def _given(values: Mapping[str, Any], known: list[str], prefix: str = "") -> Iterator[str]:
    """The dotted names of values, within groups that are known."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        yield name
        if isinstance(value, Mapping) and any(field.startswith(f"{name}.") for field in known):
            yield from _given(value, known, f"{name}.")


def _refuse_beyond(values: Any, where: str, name: str = "") -> None:
    """Raise `InputError`, naming the setting, for an integer of more than 63 bits."""
    if isinstance(values, Mapping):
        for key, value in values.items():
            _refuse_beyond(value, where, f"{name}.{key}" if name else str(key))
    elif isinstance(values, list | tuple):
        for value in values:
            _refuse_beyond(value, where, name)
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
