"""The settings that a recipe can be run in: one TOML file each, and one of your own by its path."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from typing import Any

from normattn.errors import InputError
from normattn.recipes.settings import Preset, validated


def names() -> list[str]:
    """The presets that come with the package, by name."""
    folder = resources.files(__name__)
    return sorted(
        item.name.removesuffix(".toml").replace("_", "-")
        for item in folder.iterdir()
        if item.name.endswith(".toml")
    )


def load(name: str) -> Preset:
    """The preset called `name`, or the one in the TOML file at the path `name`.

    Raises `InputError` for an unknown name (naming the nearest), a file that cannot be read, and
    a field that no preset has.
    """
    if name in names():
        packaged = resources.files(__name__) / f"{name.replace('-', '_')}.toml"
        return _validated(name, tomllib.loads(packaged.read_text("utf-8")))
    if name.endswith(".toml"):
        return _validated(Path(name).stem, _read(Path(name)))
    near = get_close_matches(name, names(), n=1, cutoff=0.4)
    hint = f"did you mean {near[0]}? " if near else ""
    raise InputError(
        f"no preset is called {name!r}: {hint}there are {', '.join(names())}, "
        "and a file of your own by its path, ending in .toml"
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise InputError(f"the preset file {path} does not exist") from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"the preset file {path} cannot be read: {error}") from error


def _validated(name: str, fields: Mapping[str, Any]) -> Preset:
    return validated(Preset, {"name": name, **fields}, f"preset {name}")
