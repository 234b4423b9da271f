"""Configuration files as checked values: JSON or TOML in, one clear sentence for a mistake."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from normattn.errors import InputError
from normattn.structured import read_json, read_toml


def read_settings(path: Path) -> dict[str, Any]:
    """The object in a .json or .toml file; the configuration inside a run's config.json."""
    if path.suffix not in (".json", ".toml"):
        raise InputError(f"{path} is no configuration: expected a .json or .toml file")
    values = read_json(path) if path.suffix == ".json" else read_toml(path)
    if not isinstance(values, dict):
        raise InputError(f"{path}: expected an object with settings, got {type(values).__name__}")
    stored = values.get("config")
    if values.keys() == {"format", "kind", "config"} and isinstance(stored, dict):
        return stored
    return values


def refuse_unknown(values: Mapping[str, Any], model: type[BaseModel], source: str) -> None:
    """Raise `InputError` for the first field that `model` does not have, naming the nearest."""
    _refuse(values, model, source, "", list(_paths(model)))


def explain(error: ValidationError) -> str:
    """The first thing that is wrong, as one sentence with the dotted field."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    message = str(first["msg"]).removeprefix("Value error, ")
    given = first["input"]
    if first["type"] == "missing":
        return f"{where} is missing"
    if isinstance(given, str | int | float) and repr(given) not in message:
        message = f"{message}, got {given!r}"
    return f"{where}: {message}" if where else message


def _refuse(
    values: Mapping[str, Any], model: type[BaseModel], source: str, prefix: str, known: list[str]
) -> None:
    for key, value in values.items():
        name = f"{prefix}{key}"
        field = model.model_fields.get(key)
        if field is None:
            siblings = [f"{prefix}{sibling}" for sibling in model.model_fields]
            elsewhere = [path for path in known if path.rpartition(".")[2] == key]
            near = difflib.get_close_matches(name, siblings, n=1, cutoff=0.6) or elsewhere[:1]
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(siblings)}"
            raise InputError(f"{source}: unknown field {name}; {hint}")
        if isinstance(value, Mapping):
            inner = _model_for(field.annotation, value)
            if inner is not None:
                _refuse(value, inner, source, f"{name}.", known)


def _models(annotation: Any) -> list[type[BaseModel]]:
    """The settings classes that a field may hold, through unions."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models(part)]


def _model_for(annotation: Any, value: Mapping[str, Any]) -> type[BaseModel] | None:
    """The class that `value` means: of several, the one of its `name`, or the first."""
    candidates = _models(annotation)
    for candidate in candidates:
        name = candidate.model_fields.get("name")
        if len(candidates) > 1 and name is not None and name.default == value.get("name"):
            return candidate
    return candidates[0] if candidates else None


def _paths(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every dotted field of a settings class."""
    for key, field in model.model_fields.items():
        yield f"{prefix}{key}"
        for inner in _models(field.annotation):
            yield from _paths(inner, f"{prefix}{key}.")
