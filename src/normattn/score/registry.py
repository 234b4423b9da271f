"""Every part by its name. Files in `score/parts` register themselves when they are imported."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import TypeVar

from normattn.errors import InputError
from normattn.score.part import Part, Slot

_PARTS: dict[str, type[Part]] = {}
P = TypeVar("P", bound=type[Part])


def register(part: P) -> P:
    """Make a part known under its name; a name is taken once and holds no hyphen."""
    if "-" in part.name or part.name in _PARTS:
        raise ValueError(f"part name {part.name!r} holds a hyphen or is taken")
    _PARTS[part.name] = part
    return part


@cache
def _discover() -> None:
    package = importlib.import_module("normattn.score.parts")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")


def parts() -> Mapping[str, type[Part]]:
    """All registered parts by name, in the order of slots and then of names."""
    _discover()
    slots = list(Slot)
    ordered = sorted(_PARTS.items(), key=lambda item: (slots.index(item[1].slot), item[0].lower()))
    return MappingProxyType(dict(ordered))


def find(name: str) -> type[Part]:
    """The part of that name; `InputError` names the nearest ones when there is none."""
    _discover()
    if name in _PARTS:
        return _PARTS[name]
    known = parts()
    lowered = {key.lower(): key for key in known}
    near = difflib.get_close_matches(name.lower(), lowered, n=3, cutoff=0.5)
    hint = f"; did you mean {' or '.join(lowered[key] for key in near)}" if near else ""
    raise InputError(
        f"unknown score part {name!r}{hint}? `normattn list` shows all of them"
        if near
        else f"unknown score part {name!r}; `normattn list` shows all of them"
    )
