"""Values as they are typed: comma lists, counts of seeds, and `key=value` settings."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from typing import Any

from normattn.errors import InputError


def names(text: str | None, what: str) -> tuple[str, ...] | None:
    """`"KNA, QNA"` as two names; None stays None; an empty or doubled name is refused."""
    if text is None:
        return None
    found = tuple(part.strip() for part in text.split(","))
    if not all(found):
        raise InputError(f"{what} holds an empty name in {text!r}; write names divided by commas")
    if len(set(found)) != len(found):
        raise InputError(f"{what} names something twice: {text}")
    return found


def integers(text: str | None, what: str, least: int = 1) -> tuple[int, ...] | None:
    """`"1,2,4"` as whole numbers, each at least `least`; a closing comma is allowed."""
    if text is None:
        return None
    parts = [part.strip() for part in text.rstrip(", ").split(",")]
    if not all(part.isdecimal() and int(part) >= least for part in parts):
        raise InputError(f"{what} takes whole numbers of at least {least}, got {text!r}")
    return tuple(int(part) for part in parts)


def seeds(text: str | None) -> tuple[int, ...] | None:
    """`"3"` is how many (0, 1, 2); `"7,8"` or `"7,"` says which."""
    found = integers(text, "--seeds", least=0)
    if found is None or text is None:
        return None
    if "," in text:
        if len(set(found)) != len(found):
            raise InputError(f"--seeds names a seed twice: {text}")
        return found
    if found[0] < 1:
        raise InputError("--seeds takes a number of seeds (at least 1) or a list such as 7,8")
    return tuple(range(found[0]))


def assignments(texts: Iterable[str]) -> dict[str, Any]:
    """`["model.dim=64"]` as `{"model.dim": 64}`; a value is read as TOML, else as plain text."""
    found: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not all(part.strip() for part in key.split(".")):
            raise InputError(f"--set takes key=value, as in --set model.dim=64, got {text!r}")
        if key.strip() in found:
            raise InputError(f"--set gives {key.strip()} twice")
        found[key.strip()] = _toml(value.strip())
    return found


def _toml(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return None if text in ("none", "null") else text
