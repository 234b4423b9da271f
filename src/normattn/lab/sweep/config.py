"""Merge layers of settings; the settings that all runs of a sweep share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ConfigDict, Field

from normattn.errors import InputError
from normattn.settings import Settings

CHANGEABLE = (
    "*.checkpoint_seconds",
    "*.track",
    "*.parallel",
    "evaluation.max_tokens",
    "changed",  # the resulting settings are compared
    "asked",  # it chooses runs, which may be added
)
"""Settings that do not affect any number of a table, so a rerun may change them. * is any group."""


class SweepConfig(Settings):
    """The settings that all runs of a sweep share; they may not change when runs are added.

    `changed` has the user's changes to the preset, by dotted name. `asked` has the options of each
    command that added runs (`Request.choices`). Each study adds further settings, such as
    `training` and `evaluation`.
    """

    model_config = ConfigDict(extra="allow")

    preset: str
    changed: dict[str, Any] = Field(default_factory=dict)
    asked: tuple[dict[str, str], ...] = ()

    @classmethod
    def of(cls, preset: str, **shared: Any) -> SweepConfig:
        """The settings of a preset that all runs share."""
        return cls.model_validate({"preset": preset, **shared})


def merged(base: Mapping[str, Any], *layers: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `base`, overridden by the nested or dotted settings of each layer in turn.

    A dotted key is a path: `{"model.dim": 64}` changes one field of `model`. Raises `InputError`
    where a value would replace a group of settings, or a group would be put below a value.
    """
    result = _copy(base)
    for layer in layers:
        for key, value in layer.items():
            _put(result, key.split("."), value, key)
    return result


def value_at(fields: Mapping[str, Any], name: str) -> Any:
    """The value at a dotted name of nested settings, or None."""
    value: Any = fields
    for key in name.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Settings as text by dotted name; None and empty groups are left out."""
    texts: dict[str, str] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            texts |= flatten(value, f"{prefix}{name}.")
        elif value not in (None, [], ()):
            text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
            texts[prefix + name] = text
    return texts


def _put(target: dict[str, Any], path: list[str], value: Any, key: str) -> None:
    *parents, last = path
    for name in parents:
        # A group that is switched off is None, such as a run's `continued`.
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
