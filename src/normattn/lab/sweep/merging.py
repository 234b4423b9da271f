"""Layers of settings: nested ones and dotted ones, each laid over the one before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from normattn.errors import InputError


def merged(base: Mapping[str, Any], *layers: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the nested or dotted settings of each layer laid over it.

    A dotted key is a path: `{"model.dim": 64}` changes one field of `model`. Raises `InputError`
    where a value would replace a group of settings, or a group go below a value.
    """
    result = _copy(base)
    for layer in layers:
        for key, value in layer.items():
            _put(result, key.split("."), value, key)
    return result


def value_at(fields: Mapping[str, Any], name: str) -> Any:
    """The value at a dotted name of nested settings; None where there is none."""
    value: Any = fields
    for key in name.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _put(target: dict[str, Any], path: list[str], value: Any, key: str) -> None:
    *parents, last = path
    for name in parents:
        # None stands where a group is switched off, as a run's `continued`.
        inner = target[name] = {} if target.get(name) is None else target[name]
        if not isinstance(inner, dict):
            raise InputError(f"{key} cannot be set: {name} is a value, not a group of settings")
        target = inner
    group = target.get(last)
    if isinstance(value, Mapping) and isinstance(group, dict):
        for name, inner_value in value.items():
            _put(group, [name], inner_value, f"{key}.{name}")
    elif isinstance(group, dict) and value is not None:
        raise InputError(
            f"{key} cannot be {value!r}: it is a group of settings ({', '.join(group)})"
        )
    else:
        target[last] = _copy(value) if isinstance(value, Mapping) else value


def _copy(value: Mapping[str, Any]) -> dict[str, Any]:
    return {k: _copy(v) if isinstance(v, Mapping) else v for k, v in value.items()}
