"""Settings: the base class, values on the command line, and differences of two records."""

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
Model = TypeVar("Model", bound="Settings")


class Settings(BaseModel):
    """Base class of settings: frozen, no unknown fields, and no booleans for numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @classmethod
    def parse(
        cls: type[Model], values: Mapping[str, Any], source: str = "the configuration"
    ) -> Model:
        """Validate `values`; `InputError` names the source, the field and the nearest valid one."""
        known = list(dict.fromkeys(_model_fields(cls)))
        for name in _value_fields(values, known):
            if name not in known:
                group, _, last = name.rpartition(".")
                siblings = [field for field in known if field.rpartition(".")[0] == group]
                elsewhere = [field for field in known if field.rpartition(".")[2] == last]
                near = difflib.get_close_matches(name, siblings, n=1, cutoff=0.6) or elsewhere[:1]
                hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(siblings)}"
                raise InputError(f"{source}: unknown field {name}; {hint}")
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise InputError(f"{source}: {explain(error)}") from error

    @model_validator(mode="before")
    @classmethod
    def _refuse_bool_for_number(cls, values: Any) -> Any:
        for name, value in values.items() if isinstance(values, dict) else ():
            if _contains_bool(value) and name in _number_fields(cls):
                raise ValueError(f"{name}: expected a number, not true or false")
        return values


def _contains_bool(value: Any) -> bool:
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, list | tuple):
        return any(map(_contains_bool, value))
    return isinstance(value, bool)


@cache
def _number_fields(model: type[BaseModel]) -> frozenset[str]:
    """Return the fields whose types include numbers but not bool."""
    types = {name: set(_types(field.annotation)) for name, field in model.model_fields.items()}
    return frozenset(n for n, t in types.items() if t & {int, float} and not t & {bool, Any})


def _types(annotation: Any) -> Iterator[Any]:
    """Yield a type and its type arguments, recursively."""
    yield annotation
    for argument in get_args(annotation):
        yield from _types(argument)


def explain(error: ValidationError) -> str:
    """Return the first validation error as one sentence with the dotted field."""
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    message, value = str(first["msg"]).removeprefix("Value error, "), first["input"]
    if first["type"] == "missing":
        return f"{where} is missing"
    if first["type"] == "extra_forbidden":
        return f"{where}: there is no such setting"
    if isinstance(value, str | int | float) and repr(value) not in message:
        message = f"{message}, got {value!r}"
    return f"{where}: {message}" if where else message


def parse_value(text: str, source: str) -> Any:
    """Parse TOML, none or null, else plain text; `InputError` beyond `parse_toml`'s limits."""
    if text in ("none", "null"):
        return None
    try:
        table = parse_toml(f"value = {text}", source)
    except InputError as error:
        if isinstance(error.__cause__, tomllib.TOMLDecodeError):
            return text
        raise
    return table["value"] if table.keys() == {"value"} else text


def format_setting(name: str, value: Any) -> list[str]:
    """Format as `name=value` for the command line; a mapping gives one string for each value."""
    if isinstance(value, Mapping) and value:
        return [s for key, inner in value.items() for s in format_setting(f"{name}.{key}", inner)]
    if isinstance(value, str) and value.strip() == value and parse_value(value, name) == value:
        return [f"{name}={value}"]
    return [f"{name}={'none' if value is None else _to_toml(value)}"]


def _to_toml(value: Any) -> str:
    """Format a value as one line of TOML, with JSON's strings and numbers."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_to_toml(k)} = {_to_toml(v)}' for k, v in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_to_toml, value))}]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _model_fields(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield every dotted field of a model, also inside unions of models."""
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}"
        # The keys of a dictionary are not fields.
        types = () if get_origin(field.annotation) is dict else _types(field.annotation)
        for kind in types:
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from _model_fields(kind, f"{prefix}{name}.")


def _value_fields(values: Mapping[str, Any], known: list[str], prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of values, inside groups that are known."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        yield name
        if isinstance(value, Mapping) and any(field.startswith(f"{name}.") for field in known):
            yield from _value_fields(value, known, f"{name}.")


def first_difference(
    stored: Any, wanted: Any, ignored: frozenset[str] = frozenset()
) -> tuple[str, str, str] | None:
    """Return the first dotted field in which two JSON values differ, with both values as text."""
    return next(differences(stored, wanted, ignored), None)


def differences(
    stored: Any, wanted: Any, ignored: frozenset[str] = frozenset(), prefix: str = ""
) -> Iterator[tuple[str, str, str]]:
    """As `first_difference`, but yield all; "*.NAME" in `ignored` is the field of any group."""
    if isinstance(stored, dict) and isinstance(wanted, dict):
        for key in [*wanted, *(key for key in stored if key not in wanted)]:
            name = f"{prefix}.{key}" if prefix else key
            if name not in ignored and f"*.{key}" not in ignored:
                pair = stored.get(key, _ABSENT), wanted.get(key, _ABSENT)
                yield from differences(*pair, ignored, name)
    # In Python, True == 1; in a configuration they differ.
    elif stored != wanted or (type(stored) is bool) != (type(wanted) is bool):
        old, new = ("absent" if value is _ABSENT else repr(value) for value in (stored, wanted))
        yield prefix, old, new
