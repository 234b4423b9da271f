"""Values as they are typed: comma lists, counts of seeds, and `key=value` settings."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from normattn.errors import InputError
from normattn.settings import read_typed

MOST_SEEDS = 100
"""A larger number is far more likely a seed of that name than a count."""


def names(text: str, option: str) -> tuple[str, ...]:
    """`"KNA, QNA"` as two names; an empty or doubled name is refused."""
    parts = tuple(part.strip() for part in text.split(","))
    if not all(parts):
        raise InputError(f"{option} holds an empty name in {text!r}; write names divided by commas")
    if len(set(parts)) != len(parts):
        raise InputError(f"{option} names something twice: {text}")
    return parts


def integers(text: str, option: str, least: int = 1) -> tuple[int, ...]:
    """`"1,2,4"` as whole numbers, each at least `least`; a closing comma is allowed."""
    parts = [part.strip() for part in text.rstrip(", ").split(",")]
    # Nineteen digits hold every number of 63 bits; longer ones cost time before they are refused.
    if not all(part.isdecimal() and len(part) < 20 and int(part) >= least for part in parts):
        raise InputError(f"{option} takes whole numbers of at least {least}, got {text!r}")
    numbers = tuple(int(part) for part in parts)
    if max(numbers) >= 1 << 63:
        raise InputError(f"{option} takes whole numbers of at most 63 bits, got {text!r}")
    return numbers


def seeds(text: str, option: str = "--seeds") -> tuple[int, ...]:
    """`"3"` is how many (0, 1, 2); `"7,8"` or `"7,"` says which."""
    numbers = integers(text, option, least=0)
    if "," in text:
        if len(set(numbers)) != len(numbers):
            raise InputError(f"{option} names a seed twice: {text}")
        return numbers
    if not 1 <= numbers[0] <= MOST_SEEDS:
        raise InputError(
            f"{option} takes a number of seeds (at least 1, at most {MOST_SEEDS}) or a list such "
            f"as 7,8 (of one: 7,), got {text}"
        )
    return tuple(range(numbers[0]))


def assignments(texts: Iterable[str], option: str = "--set") -> dict[str, Any]:
    """`["model.dim=64"]` as `{"model.dim": 64}`; a value is read as TOML, else as plain text."""
    assigned: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not all(part.strip() for part in key.split(".")):
            raise InputError(f"{option} takes key=value, as in {option} model.dim=64, got {text!r}")
        if key.strip() in assigned:
            raise InputError(f"{option} gives {key.strip()} twice")
        assigned[key.strip()] = read_typed(value.strip(), f"{option} {key.strip()}")
    return assigned


def dtype(text: str, option: str) -> str:
    """The name of a type of weights: fp32 or bf16."""
    if text not in ("fp32", "bf16"):
        raise InputError(f"{option} is fp32 or bf16, not {text!r}")
    return text
