"""What data is read from: kinds that register themselves, and the addresses that name them."""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar, Generic, TypeVar
from urllib.parse import parse_qsl

from normattn.errors import InputError
from normattn.files import expanded


class Source(ABC):
    """Data as a value that names it and can read it again.

    Subclasses are frozen dataclasses, one kind in one file, and register themselves.
    """

    kind: ClassVar[str]
    summary: ClassVar[str]

    @classmethod
    @abstractmethod
    def claims(cls, body: str) -> bool:
        """Whether `body` (the address before its `?`) is of this kind."""

    @abstractmethod
    def fingerprint(self) -> str:
        """A short hash that changes when the data (or what finds it) changes; cheap to make."""


S = TypeVar("S", bound=Source)
Kind = TypeVar("Kind", bound=type[Source])


class Registry(Generic[S]):
    """The kinds of one sort of data, by name.

    `subject` is the sort in words, `expected` the addresses there are, `refusal` what is said of
    another.
    """

    def __init__(self, subject: str, expected: str, refusal: str = "does not exist") -> None:
        self.subject, self.expected, self.refusal = subject, expected, refusal
        self._kinds: dict[str, type[S]] = {}

    def register(self, kind: Kind) -> Kind:
        """Class decorator: make a kind known."""
        if kind.kind in self._kinds:
            raise ValueError(f"two kinds of {self.subject} are called {kind.kind!r}")
        self._kinds[kind.kind] = kind  # type: ignore[assignment]
        return kind

    def kinds(self) -> Mapping[str, type[S]]:
        """Every registered kind."""
        return dict(self._kinds)

    def find(self, text: str) -> tuple[type[S], str, dict[str, str]]:
        """The kind that an address `body?option=value&…` names, its body and its options.

        Raises `InputError` for an address of no kind, with the nearest name.
        """
        body, options = self._split(text)
        for kind in self._kinds.values():
            if kind.claims(body):
                return kind, body, options
        named = [name for name, kind in self._kinds.items() if kind.claims(name)]
        near = difflib.get_close_matches(body, named, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise InputError(f"corpus {body!r} {self.refusal}: {hint}expected {self.expected}")

    def _split(self, text: str) -> tuple[str, dict[str, str]]:
        body, mark, query = text.partition("?")
        if not text.strip():
            raise InputError(f"the {self.subject} has no name: expected {self.expected}")
        if not mark or expanded(text).exists():
            return text, {}
        try:
            pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=True)
        except ValueError as error:
            raise InputError(
                f"corpus {text!r}: expected ?option=value&… behind the name"
            ) from error
        return body, once(text, pairs)


def once(text: str, pairs: Sequence[tuple[str, str]]) -> dict[str, str]:
    """The options of an address; `InputError` where one is given more than once."""
    options = dict(pairs)
    if len(options) < len(pairs):
        twice = next(name for name, count in Counter(n for n, _ in pairs).items() if count > 1)
        raise InputError(f"corpus {text!r}: the option {twice!r} is given more than once")
    return options


def take_options(
    where: str, options: Mapping[str, str], known: Iterable[str]
) -> dict[str, str | None]:
    """The values of the `known` options (None where absent); any other one is an `InputError`."""
    accepted = list(known)
    for name, value in options.items():
        if name not in accepted:
            said = f"it knows {', '.join(accepted)}" if accepted else "it takes none"
            raise InputError(f"corpus {where!r} has no option {name!r}: {said}")
        if not value:
            raise InputError(f"corpus {where!r}: the option {name!r} is empty")
    return {name: options.get(name) for name in accepted}


def address(body: str, **options: str | None) -> str:
    """`body?name=value&…` with the options that are set: the inverse of parsing."""
    parts = [f"{name}={value}" for name, value in options.items() if value is not None]
    return body + ("?" + "&".join(parts) if parts else "")
