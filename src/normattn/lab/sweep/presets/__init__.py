"""The settings that a recipe can be run in: one TOML file each, and one of your own by its path."""

from __future__ import annotations

import tomllib
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, TypeVar

from normattn.errors import InputError, unknown
from normattn.io import read_toml
from normattn.lab.sweep.settings import STUDY_GROUPS, Preset, validated

OwnPreset = TypeVar("OwnPreset", bound=Preset)


def names(study: str | None = None) -> list[str]:
    """The presets that come with the package, by name; those of one study where it has its own."""
    return sorted(
        item.name.removesuffix(".toml").replace("_", "-")
        for item in _folder(study).iterdir()
        if item.name.endswith(".toml")
    )


def load(name: str) -> Preset:
    """The preset of the studies of language models called `name`, as `fields` finds it."""
    return load_as(Preset, name)


def load_as(kind: type[OwnPreset], name: str) -> OwnPreset:
    """The same with the settings of the study that `kind` belongs to, without those of others."""
    name, settings = fields(name)
    others = set(STUDY_GROUPS) - kind.model_fields.keys()
    own = {group: value for group, value in settings.items() if group not in others}
    return validated(kind, {"name": name, **own}, f"preset {name}")


def fields(name: str, study: str | None = None) -> tuple[str, dict[str, Any]]:
    """The name and the settings of the preset `name`, or of the TOML file at the path `name`.

    Raises `InputError` for an unknown name (naming the nearest) and a file that cannot be read.
    """
    known = names(study)
    if name in known:
        packaged = _folder(study) / f"{name.replace('-', '_')}.toml"
        return name, tomllib.loads(packaged.read_text("utf-8"))
    if name.endswith(".toml"):
        return Path(name).stem, _read(Path(name))
    raise unknown("preset", name, known, ", and a file of your own by its path, ending in .toml")


def typed(name: str, study: str) -> str:
    """How the preset of that name is typed: one that does not come with the package is a file."""
    known = names(study if _folder(study).is_dir() else None)
    return name if name in known else f"./{name}.toml"


def _folder(study: str | None) -> Traversable:
    here = resources.files(__name__)
    return here if study is None else here / study


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_toml(path)
    except InputError as error:
        raise InputError(f"the preset file {error}") from error
