"""JSON and TOML from outside: one reader, with a bound on size, depth, digits and numbers.

A value that passes is safe to walk, to print and to write again: nothing below runs into the
interpreter's own limits. What does not pass is an `InputError` that names where it stood.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, get_args

from pydantic import BaseModel, ConfigDict, model_validator

from normattn.errors import InputError
from normattn.files import read_bytes

MOST_BYTES = 64 << 20
"""Of a JSON file, and of one line of JSON lines."""
MOST_TOML_BYTES = 1 << 20
MOST_DEPTH = 64
MOST_DIGITS = 64
"""Of a whole number; the state of a random generator has 39."""
_ABSENT = object()


class Settings(BaseModel):
    """Base of every group of settings: frozen; refuses an unknown field, and true for a number."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _refuse_truth_for_a_number(cls, values: Any) -> Any:
        for name, value in values.items() if isinstance(values, dict) else ():
            if _holds_truth(value) and name in _numbers(cls):
                raise ValueError(f"{name}: expected a number, not true or false")
        return values


def _holds_truth(value: Any) -> bool:
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, list | tuple):
        return any(map(_holds_truth, value))
    return isinstance(value, bool)


@cache
def _numbers(model: type[BaseModel]) -> frozenset[str]:
    """The fields that hold numbers, and nothing that true is a value of."""
    parts = {name: set(_parts(field.annotation)) for name, field in model.model_fields.items()}
    return frozenset(n for n, of in parts.items() if of & {int, float} and not of & {bool, Any})


def _parts(annotation: Any) -> Iterator[Any]:
    """The types that a type is made of, itself among them."""
    yield annotation
    for part in get_args(annotation):
        yield from _parts(part)


def read_json(path: Path, most: int = MOST_BYTES) -> Any:
    """The value in a JSON file."""
    return parse_json(read_bytes(path, most), str(path))


def read_object(path: Path, most: int = MOST_BYTES) -> dict[str, Any]:
    """The object in a JSON file; `InputError` when it is missing, damaged or no object."""
    value = read_json(path, most)
    if not isinstance(value, dict):
        raise InputError(f"{path} is damaged: expected a JSON object, found {type(value).__name__}")
    return value


def read_toml(path: Path) -> dict[str, Any]:
    """The table in a TOML file."""
    content = read_bytes(path, MOST_TOML_BYTES)
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text ({error.reason})") from error
    return parse_toml(text, str(path))


def parse_json(content: bytes | str, where: str) -> Any:
    """The value that JSON text says; `where` names it in the message.

    NaN and infinities, which are no JSON, are refused as is what is nested more than 64 deep or
    has a number of more than 64 digits.
    """

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is no number")

    def parse() -> Any:
        return json.loads(content, parse_int=_whole, parse_float=_real, parse_constant=refuse)

    return _bounded(parse, where, "JSON")


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """The table that TOML text says; bounds as of `parse_json`, but NaN and infinity are TOML."""
    table: dict[str, Any] = _bounded(lambda: tomllib.loads(text), where, "TOML")
    return table


def read_typed(text: str, source: str) -> Any:
    """The value that is meant by a setting's text: TOML's, or none or null, else the text itself.

    What only began as TOML, a list nested without end or a number of thousands of digits, is
    refused: nobody means it as text.
    """
    if text in ("none", "null"):
        return None
    try:
        table = parse_toml(f"value = {text}", source)
    except InputError as error:
        if isinstance(error.__cause__, tomllib.TOMLDecodeError):
            return text
        raise
    return table["value"] if table.keys() == {"value"} else text


def typed(name: str, value: Any) -> list[str]:
    """`name=value` as it is typed, so that `read_typed` gives the value again.

    A group of settings is typed one by one.
    """
    if isinstance(value, Mapping) and value:
        return [line for key, inner in value.items() for line in typed(f"{name}.{key}", inner)]
    if isinstance(value, str) and value.strip() == value and read_typed(value, name) == value:
        return [f"{name}={value}"]
    return [f"{name}={'none' if value is None else _as_toml(value)}"]


def _as_toml(value: Any) -> str:
    """A value within one line of TOML, whose strings and numbers are those of JSON."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_as_toml(k)} = {_as_toml(v)}' for k, v in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_as_toml, value))}]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def refuse_beyond(values: Any, where: str) -> None:
    """Raise `InputError` for a whole number beyond 63 bits, which no setting is; by its name."""
    level = [("", values)]
    while level:
        name, value = level.pop()
        if isinstance(value, Mapping):
            level += [
                (f"{name}.{key}" if name else str(key), inner) for key, inner in value.items()
            ]
        elif isinstance(value, list | tuple):
            level += [(name, inner) for inner in value]
        elif isinstance(value, int) and value.bit_length() > 63:
            digits = f"about 10^{round(value.bit_length() * 0.30103)}"
            raise InputError(f"{where}: {name} must be a number of at most 63 bits, got {digits}")


def first_difference(
    stored: Any, wanted: Any, ignored: frozenset[str] = frozenset(), prefix: str = ""
) -> tuple[str, str, str] | None:
    """The first dotted field in which two JSON values differ, with both values as text."""
    if isinstance(stored, dict) and isinstance(wanted, dict):
        for key in [*wanted, *(key for key in stored if key not in wanted)]:
            name = f"{prefix}.{key}" if prefix else key
            if name in ignored:
                continue
            difference = first_difference(
                stored.get(key, _ABSENT), wanted.get(key, _ABSENT), ignored, name
            )
            if difference is not None:
                return difference
        return None
    # In Python, True == 1; in a configuration they differ.
    same = stored == wanted and (type(stored) is bool) == (type(wanted) is bool)
    return None if same else (prefix, _shown(stored), _shown(wanted))


def _shown(value: Any) -> str:
    return "absent" if value is _ABSENT else repr(value)


def json_lines(file: BinaryIO, where: Callable[[int], str]) -> Iterator[tuple[int, bytes]]:
    """The number, from 1, and the bytes of each line, its end included.

    A line longer than 64 MiB is refused before it is held. `where(n)` names line n.
    """
    number = 0
    while line := file.readline(MOST_BYTES + 1):
        number += 1
        if len(line) > MOST_BYTES:
            raise InputError(f"{where(number)} is longer than {MOST_BYTES:,} bytes")
        yield number, line


def _bounded(parse: Callable[[], Any], where: str, kind: str) -> Any:
    deep = f"{where} is not valid {kind}: it is nested more than {MOST_DEPTH} deep"
    try:
        value = parse()
    except RecursionError as error:
        raise InputError(deep) from error
    except ValueError as error:
        raise InputError(f"{where} is damaged: it is not valid {kind} ({error})") from error
    problem = _problem(value)
    if problem == "depth":
        raise InputError(deep)
    if problem is not None:
        raise InputError(f"{where} is damaged: {problem}")
    return value


def _whole(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits, at most {MOST_DIGITS} are read")
    return int(digits)


def _real(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"{text[:24]} is beyond every floating-point number")
    return value


def _problem(value: Any) -> str | None:
    """What of a parsed value is out of bounds; walked level by level, never by recursion."""
    level = [value]
    for _ in range(MOST_DEPTH + 1):
        inner: list[Any] = []
        for member in level:
            if isinstance(member, dict):
                inner += member.values()
            elif isinstance(member, list):
                inner += member
            elif isinstance(member, int) and member.bit_length() > 4 * MOST_DIGITS:
                return f"it holds a number of more than {MOST_DIGITS} digits"
        if not inner:
            return None
        level = inner
    return "depth"
