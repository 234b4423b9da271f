"""The grammar of specifications: texts to parts and back.

`PART(-PART)*(@L)?`, a part being `Name` or `Name(field=value,…)`.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import re
import types
import typing
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
Given = tuple[type[Part], dict[str, Any]]
"""A part and the values that a text gives its fields."""


def read(text: str) -> tuple[list[Given], int | None]:
    """The parts that `text` names with the fields that it gives them, and its training length.

    The name of a model (`normattn.score.recipes`) means the components of its score.
    """
    if not isinstance(text, str):
        raise InputError(f"a score is a ScoreSpec or its name, but {text!r} was given")
    body, length = text.strip(), None
    if match := _LENGTH.search(body):
        body, length = body[: match.start()], _whole(match["length"])
        if length is None:
            raise InputError(f"{text!r} gives a training length that is too large")
    if (model := recipe(body)) is not None:
        given, own = read(model)
        return given, agreed_length(body, own, length)
    for alias, name in _ALIASES.items():
        body = re.sub(rf"{re.escape(alias)}(?=$|[-(@])", name, body)
    return [_parse_part(match, text) for match in _split(body, text)], length


def agreed_length(text: str, own: int | None, other: int | None) -> int | None:
    """The training length of a score, or the one given with it; `InputError` if they differ."""
    if None not in (own, other) and own != other:
        raise InputError(f"{text!r} has a training length of {own}, but {other} was given")
    return other if own is None else own


def build_parts(
    given: list[Given], parameters: typing.Mapping[str, Any], text: str
) -> tuple[Part, ...]:
    """The parts with their values; each parameter goes to the one that has its field open."""
    for key, value in parameters.items():
        known = {field.name for part, _ in given for field in dataclasses.fields(part)}
        if key not in known:
            raise unknown_name(f"parameter of {text!r}", key, sorted(known))
        takers = [
            fields
            for part, fields in given
            if key in {field.name for field in dataclasses.fields(part)} and key not in fields
        ]
        if not takers:
            raise InputError(f"{key} is already given in {text!r}")
        if len(takers) > 1:
            raise InputError(
                f"two components of {text!r} take {key!r}: write it after the one that you mean"
            )
        takers[0][key] = value
    return tuple(_build(part, fields, text) for part, fields in given)


def _split(body: str, text: str) -> list[re.Match[str]]:
    """The parts of a text, each a match; `InputError` says where it is none."""
    match = _PARTS.match(body)
    end = 0 if match is None else match.end()
    if match is None or end != len(body):
        raise InputError(
            f"{text!r} is not a score: expected names joined by hyphens, like "
            f"CosA-logn-YaRN(factor=8)@512, but found {body[end : end + 12]!r}"
        )
    return list(_PART.finditer(body))


def _parse_part(match: re.Match[str], text: str) -> Given:
    part, fields = find(match["name"]), dict[str, Any]()
    for item in filter(None, (match["fields"] or "").split(",")):
        key, equals, value = (piece.strip() for piece in item.partition("="))
        if not equals or key in fields:
            raise InputError(f"{text!r}: {item.strip()!r} is not one new field=value")
        fields[key] = value
    return part, fields


@functools.cache
def _hints(part: typing.Hashable) -> dict[str, Any]:
    """The types of a part's fields; evaluating annotations costs more than all else here."""
    return typing.get_type_hints(part)


def _build(part: type[Part], values: dict[str, Any], text: str) -> Part:
    known = {field.name for field in dataclasses.fields(part)}
    for key in values:
        if key not in known:
            has = ", ".join(sorted(known)) or "no parameters"
            raise InputError(f"{text!r}: {part.name} has no parameter {key!r}; it has {has}")
    hints = _hints(typing.cast(typing.Hashable, part))
    return part(**{key: _convert(hints[key], value, part, key) for key, value in values.items()})


def _convert(hint: Any, value: Any, part: type[Part], key: str) -> Any:
    """`value` as the field's type; text is read, numbers must be of the right kind."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        hint = next(choice for choice in typing.get_args(hint) if choice is not type(None))
    if typing.get_origin(hint) is Literal:
        if isinstance(value, str) and value in typing.get_args(hint):
            return value
        expected = " or ".join(repr(choice) for choice in typing.get_args(hint))
    elif typing.get_origin(hint) is tuple:
        pieces = value.split(":") if isinstance(value, str) else value
        if isinstance(pieces, list | tuple):
            return tuple(_convert(typing.get_args(hint)[0], piece, part, key) for piece in pieces)
        expected = "numbers divided by colons"
    elif hint is bool:
        if isinstance(value, bool) or value in ("true", "false"):
            return value if isinstance(value, bool) else value == "true"
        expected = "true or false"
    else:
        expected = "a whole number" if hint is int else "a number"
        number = _whole(value) if hint is int else _real(value)
        if number is not None:
            return number
    raise InputError(f"{part.name}: {key} must be {expected}, but it is {value!r}")


def _whole(value: Any) -> int | None:
    """A whole number, exactly, as torch counts: of at most 63 bits; None for anything else."""
    if isinstance(value, str) and _DIGITS.fullmatch(value):
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        # 1e3 and 4.0 are whole numbers too, as far as a float tells all of them apart.
        real = _real(value)
        if real is None or not real.is_integer() or abs(real) > 1 << 53:
            return None
        value = int(real)
    return value if abs(value) < 1 << 63 else None


def _real(value: Any) -> float | None:
    """A floating-point number, be it infinite (which its part may refuse); None for others."""
    if isinstance(value, bool) or (isinstance(value, str) and len(value) > _LONGEST_NUMBER):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def print_part(part: Part, usual: Part | None = None) -> str:
    """The part as `read` reads it: its name, and the fields that are not as by default.

    Fields as in `usual` are left out too.
    """
    changed = [
        f"{field.name}={_print_value(getattr(part, field.name))}"
        for field in dataclasses.fields(part)
        if getattr(part, field.name) not in (field.default, getattr(usual, field.name, None))
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
    """A training length, checked: a whole number of at least 2."""
    try:
        length = operator.index(value)
    except TypeError:
        length = 0
    if not 2 <= length < 1 << 63 or isinstance(value, bool):
        raise InputError(
            f"a training length must be a whole number of at least 2, but it is {value!r}"
        )
    return length
