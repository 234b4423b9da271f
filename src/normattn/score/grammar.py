"""Parsing and printing of specifications, whose grammar `normattn.score.spec` describes."""

from __future__ import annotations

import dataclasses
import functools
import operator
import re
import typing
from types import UnionType
from typing import Any, Literal

from normattn.errors import InputError, unknown_name
from normattn.score.parts.base import Part, find
from normattn.score.recipes import recipe

_NAME = r"[A-Za-z][A-Za-z0-9_]*\+?"
_PART = re.compile(rf"(?P<name>{_NAME})(?:\((?P<fields>[^()]*)\))?")
_PARTS = re.compile(rf"{_NAME}(?:\([^()]*\))?(?:-{_NAME}(?:\([^()]*\))?)*")
_DIGITS = re.compile(r"[+-]?[0-9]{1,19}")
_LONGEST_NUMBER = 64
_LENGTH = re.compile(r"@(?P<length>[0-9]+)$")
_ALIASES = {"NTK-mixed": "NTKMixed", "NTK-old": "NTKOld", "NTK-fixed": "NTK"}
_ALIASES |= {"KERPLE-log": "KERPLELog", "KERPLE-power": "KERPLEPower"}
NamedPart = tuple[type[Part], dict[str, Any]]
"""A part's class and the values of its fields in a text."""


def read(text: str) -> tuple[list[NamedPart], int | None]:
    """The parts and the training length in `text`; the name of a model stands for its recipe."""
    if not isinstance(text, str):
        raise InputError(f"a score is a ScoreSpec or its name, but {text!r} was given")
    body, length = text.strip(), None
    if match := _LENGTH.search(body):
        body, length = body[: match.start()], _number(match["length"], True)
        if length is None:
            raise InputError(f"{text!r} gives a training length that is too large")
    if (model := recipe(body)) is not None:
        parts, model_length = read(model)
        return parts, agreed_length(body, model_length, length)
    for alias, name in _ALIASES.items():
        body = re.sub(rf"{re.escape(alias)}(?=$|[-(@])", name, body)
    parsed = _PARTS.match(body)
    end = 0 if parsed is None else parsed.end()
    if parsed is None or end != len(body):
        raise InputError(
            f"{text!r} is not a score: expected names joined by hyphens, like "
            f"CosA-logn-YaRN(factor=8)@512, but found {body[end : end + 12]!r}"
        )
    named_parts: list[NamedPart] = []
    for match in _PART.finditer(body):
        fields: dict[str, Any] = {}
        named_parts.append((find(match["name"]), fields))
        for item in filter(None, (match["fields"] or "").split(",")):
            key, equals, value = (piece.strip() for piece in item.partition("="))
            if not equals or key in fields:
                raise InputError(f"{text!r}: {item.strip()!r} is not one new field=value")
            fields[key] = value
    return named_parts, length


def agreed_length(text: str, length: int | None, requested: int | None) -> int | None:
    """The training length of a score or the requested one; `InputError` if they differ."""
    requested = None if requested is None else check_train_length(requested)
    if None not in (length, requested) and length != requested:
        raise InputError(f"{text!r} has a training length of {length}, but {requested} was given")
    return requested if length is None else length


def build_parts(
    named_parts: list[NamedPart], parameters: typing.Mapping[str, Any], text: str
) -> tuple[Part, ...]:
    """Build parts; each of `parameters` goes to the part that has the field but does not set it."""
    for key, value in parameters.items():
        known = {name for part, _ in named_parts for name in _field_types(part)}
        if key not in known:
            raise unknown_name(f"parameter of {text!r}", key, sorted(known))
        takers = [fields for part, fields in named_parts if key in _field_types(part)]
        candidates = [fields for fields in takers if key not in fields]
        if not candidates:
            raise InputError(f"{key} is already given in {text!r}")
        if len(candidates) > 1:
            raise InputError(
                f"two components of {text!r} take {key!r}: write it after the one that you mean"
            )
        candidates[0][key] = value
    parts = []
    for part, fields in named_parts:
        types, values = _field_types(part), {}
        for key, value in fields.items():
            if key not in types:
                has = ", ".join(sorted(types)) or "no parameters"
                raise InputError(f"{text!r}: {part.name} has no parameter {key!r}; it has {has}")
            values[key] = _convert(types[key], value, part, key)
        parts.append(part(**values))
    return tuple(parts)


# Cached because evaluating annotations is slow.
_type_hints: Any = functools.cache(typing.get_type_hints)


def _field_types(part: type[Part]) -> dict[str, Any]:
    """The types of a part's parameters by name."""
    hints = _type_hints(part)
    return {field.name: hints[field.name] for field in dataclasses.fields(part)}


def _convert(hint: Any, value: Any, part: type[Part], key: str) -> Any:
    if isinstance(hint, UnionType) or typing.get_origin(hint) is typing.Union:
        hint = next(choice for choice in typing.get_args(hint) if choice is not type(None))
    if typing.get_origin(hint) is Literal:
        if isinstance(value, str) and value in typing.get_args(hint):
            return value
        expected = " or ".join(repr(choice) for choice in typing.get_args(hint))
    elif typing.get_origin(hint) is tuple:
        items = value.split(":") if isinstance(value, str) else value
        if isinstance(items, list | tuple):
            return tuple(_convert(typing.get_args(hint)[0], item, part, key) for item in items)
        expected = "numbers divided by colons"
    elif hint is bool:
        if isinstance(value, bool) or value in ("true", "false"):
            return value if isinstance(value, bool) else value == "true"
        expected = "true or false"
    else:
        expected = "a whole number" if hint is int else "a number"
        if (number := _number(value, hint is int)) is not None:
            return number
    raise InputError(f"{part.name}: {key} must be {expected}, but it is {value!r}")


def _number(value: Any, whole: bool) -> Any:
    """A float, or an integer of at most 63 bits, also from 1e3 and 4.0; None for anything else."""
    if isinstance(value, bool) or (isinstance(value, str) and len(value) > _LONGEST_NUMBER):
        return None
    try:
        real = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    if not whole or not real.is_integer():
        return None if whole else real
    # Floats above 2^53 are inexact.
    number = int(value) if _DIGITS.fullmatch(str(value)) else int(real)
    return number if abs(number) < 1 << 63 else None


def print_part(part: Part, implied: Part | None = None) -> str:
    """Format a part for `read`: its name and the fields that are neither default nor `implied`."""
    changed = [
        f"{field.name}={_print_value(getattr(part, field.name))}"
        for field in dataclasses.fields(part)
        if getattr(part, field.name) not in (field.default, getattr(implied, field.name, None))
    ]
    return f"{part.name}({','.join(changed)})" if changed else part.name


def _print_value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ":".join(_print_value(item) for item in value)
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return str(value)


def check_train_length(value: Any) -> int:
    """Check a training length: a whole number of at least 2."""
    try:
        length = operator.index(value)
    except TypeError:
        length = 0
    if not 2 <= length < 1 << 63 or isinstance(value, bool):
        raise InputError(
            f"a training length must be a whole number of at least 2, but it is {value!r}"
        )
    return length
