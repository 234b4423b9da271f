"""What a corpus is: a value that names some text and can read it again, document by document."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from normattn.errors import InputError


@dataclass(frozen=True)
class Document:
    """One piece of text, its name (unique inside its corpus), and what places it in a split.

    Documents of one `group` stand in one split; without a group a document is its own.
    """

    name: str
    text: str
    group: str | None = None

    @property
    def split_name(self) -> str:
        """The name by which the split is decided."""
        return self.name if self.group is None else self.group


class Corpus(ABC):
    """Some text, as a value: `str(corpus)` parses back to an equal one.

    Subclasses are frozen dataclasses, one kind in one file, and register themselves with
    `register`. Text is always streamed: a corpus may be larger than the memory.
    """

    kind: ClassVar[str]
    summary: ClassVar[str]

    @classmethod
    @abstractmethod
    def claims(cls, body: str) -> bool:
        """Whether `body` (the address before its `?`) names a corpus of this kind."""

    @classmethod
    @abstractmethod
    def parse(cls, body: str, options: Mapping[str, str]) -> Corpus:
        """Build the corpus of an address; `InputError` for an option it does not know."""

    @abstractmethod
    def documents(self, limit: int | None = None) -> Iterator[Document]:
        """Yield the documents in a fixed order, at most `limit` bytes of text in all.

        Raises `InputError` where the text is missing, unreadable or not UTF-8.
        """

    @abstractmethod
    def fingerprint(self) -> str:
        """A short hash that changes when the text (or what finds it) changes; cheap to make."""

    @abstractmethod
    def total_bytes(self) -> int | None:
        """About how many bytes of text there are; None when that is only known at the end."""

    def sources(self) -> dict[str, str]:
        """What the text was taken from, each with its version; empty where nothing is versioned."""
        return {}

    @abstractmethod
    def __str__(self) -> str: ...


_KINDS: dict[str, type[Corpus]] = {}
_Kind = TypeVar("_Kind", bound=type[Corpus])


def register(kind: _Kind) -> _Kind:
    """Class decorator: make a kind of corpus known to `parse_corpus`."""
    if kind.kind in _KINDS:
        raise ValueError(f"two kinds of corpus are called {kind.kind!r}")
    _KINDS[kind.kind] = kind
    return kind


def kinds() -> Mapping[str, type[Corpus]]:
    """Every registered kind of corpus, by name."""
    return dict(_KINDS)


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
