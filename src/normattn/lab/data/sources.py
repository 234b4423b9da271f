"""What text is read from: documents, corpora as values, their addresses and limits in bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar
from urllib.parse import parse_qsl

from normattn.errors import InputError
from normattn.io import expanded

File = TypeVar("File")


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
    """Some text, as a value. It is always streamed: it may be larger than the memory."""

    @abstractmethod
    def documents(self, limit: int | None = None) -> Iterator[Document]:
        """Yield the documents in a fixed order, at most `limit` bytes of text in all.

        Raises `InputError` where the text is missing, unreadable or not UTF-8.
        """

    @abstractmethod
    def fingerprint(self) -> str:
        """A short hash that changes when the text (or what finds it) changes; cheap to make."""

    def sources(self) -> dict[str, str]:
        """What the text was taken from, each with its version; empty where nothing is versioned."""
        return {}

    def notes(self) -> tuple[str, ...]:
        """What a plan says of the corpus before anything is done: what is fetched, what it needs.

        Raises `InputError` where a library that it needs is not installed.
        """
        return ()


@dataclass(frozen=True)
class Address:
    """`body` or `body?option=value&…`, which names some data; a path may hold a `?`."""

    body: str
    options: Mapping[str, str]

    @classmethod
    def parse(cls, text: str, kind: str = "corpus") -> Address:
        """Take an address apart; `InputError` where it is empty or its options cannot be read."""
        if not text.strip():
            raise InputError(f"the {kind} has no name")
        body, mark, query = text.partition("?")
        if not mark or expanded(text).exists():
            return cls(text, {})
        try:
            pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=True)
        except ValueError as error:
            raise InputError(
                f"{kind} {text!r}: expected ?option=value&… behind the name"
            ) from error
        for name, value in pairs:
            if [given for given, _ in pairs].count(name) > 1:
                raise InputError(f"{kind} {text!r}: the option {name!r} is given more than once")
            if not value:
                raise InputError(f"{kind} {text!r}: the option {name!r} is empty")
        return cls(body, dict(pairs))

    def take(self, *known: str) -> dict[str, str | None]:
        """The values of the `known` options, None where absent; `InputError` for any other one."""
        for name in self.options:
            if name not in known:
                lists = f"it knows {', '.join(known)}" if known else "it takes none"
                raise InputError(f"corpus {self.body!r} has no option {name!r}: {lists}")
        return {name: self.options.get(name) for name in known}

    def __str__(self) -> str:
        options = "&".join(f"{name}={value}" for name, value in self.options.items())
        return f"{self.body}?{options}" if options else self.body


# Limits.


def evenly(files: Sequence[File], sizes: Sequence[int], limit: int | None) -> list[File]:
    """Those files whose reading takes about `limit` bytes evenly from all of them.

    A file is kept while what is kept lags behind its share of what was passed (error diffusion),
    so the choice is deterministic and does not favour the start of the alphabet. At least one
    file is kept when there is any: `capped` then cuts it.
    """
    total = sum(sizes)
    if limit is None or total <= limit:
        return list(files)
    seen = kept = 0
    chosen = []
    for file, size in zip(files, sizes, strict=True):
        if kept * total <= limit * seen and kept + size <= limit:
            chosen.append(file)
            kept += size
        seen += size
    return chosen or list(files[:1])


def shares(sizes: Sequence[int], limit: int | None) -> list[int]:
    """How many bytes of each of several files to read, so that `limit` comes evenly from all.

    Files of up to a sixteenth of the limit are read whole or not, as `evenly` says. Of a larger one
    what is due with it is read, at least a sixteenth: one large file among small ones is cut, not
    passed over.
    """
    total = sum(sizes)
    if limit is None or total <= limit:
        return list(sizes)
    least = max(1, limit // 16)
    seen = kept = 0
    parts = []
    for size in sizes:
        behind = kept * total <= limit * seen
        seen += size
        due = limit * seen // total - kept
        if size <= least:
            parts.append(size if behind and kept + size <= limit else 0)
        else:
            parts.append(min(size, due) if due >= least else 0)
        kept += parts[-1]
    return parts


def capped(documents: Iterable[Document], limit: int | None) -> Iterator[Document]:
    """The first `limit` bytes of the documents; the last one is cut behind a line if it can."""
    if limit is None:
        yield from documents
        return
    for document in documents:
        raw = document.text.encode()
        if len(raw) > limit:
            head = raw[:limit].decode(errors="ignore")
            text = head[: head.rfind("\n") + 1] or head
            if text:
                yield replace(document, text=text)
            return
        limit -= len(raw)
        yield document
