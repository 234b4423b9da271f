"""What text is read from: documents, corpora as values, their addresses and limits in bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar
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
    """Some text, as a value: `str(corpus)` parses back to an equal one.

    Text is always streamed: a corpus may be larger than the memory.
    """

    kind: ClassVar[str]

    @classmethod
    @abstractmethod
    def claims(cls, body: str) -> bool:
        """Whether `body` (the address before its `?`) is of this kind."""

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

    def notes(self) -> tuple[str, ...]:
        """What a plan says of the corpus before anything is done: what is fetched, what it needs.

        Raises `InputError` where a library that it needs is not installed.
        """
        return ()

    @abstractmethod
    def __str__(self) -> str: ...


def split_address(text: str, subject: str = "corpus") -> tuple[str, dict[str, str]]:
    """The body and the options of an address `body?option=value&…`; a path may hold a `?`.

    Raises `InputError` for an empty address, and for options that cannot be read.
    """
    if not text.strip():
        raise InputError(f"the {subject} has no name")
    body, mark, query = text.partition("?")
    if not mark or expanded(text).exists():
        return text, {}
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=True)
    except ValueError as error:
        raise InputError(f"corpus {text!r}: expected ?option=value&… behind the name") from error
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


def spread(sizes: Sequence[int], limit: int | None) -> list[bool]:
    """Which of several files to read so that about `limit` bytes come evenly from all of them.

    A file is kept while what is kept lags behind its share of what was passed (error diffusion),
    so the choice is deterministic and does not favour the start of the alphabet. At least one
    file is kept when there is any: `capped` then cuts it.
    """
    total = sum(sizes)
    if limit is None or total <= limit:
        return [True] * len(sizes)
    seen = kept = 0
    keep = []
    for size in sizes:
        chosen = kept * total <= limit * seen and kept + size <= limit
        keep.append(chosen)
        kept += size if chosen else 0
        seen += size
    if keep and not any(keep):
        keep[0] = True
    return keep


def shares(sizes: Sequence[int], limit: int | None) -> list[int]:
    """How many bytes of each of several files to read, so that `limit` comes evenly from all.

    Files of up to a sixteenth of the limit are read as `spread` says, whole or not. Of a larger one
    what is due with it, at least a sixteenth: one large file among small ones is cut, not passed
    over. So at most a sixteenth of the limit is left unused. Installed packages are
    chosen by `spread` alone: published results are of the files that it keeps.
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


def evenly(files: Sequence[File], sizes: Sequence[int], limit: int | None) -> list[File]:
    """The files that `spread` keeps of those of these sizes."""
    return [file for file, kept in zip(files, spread(sizes, limit), strict=True) if kept]


def capped(documents: Iterable[Document], limit: int | None) -> Iterator[Document]:
    """The first `limit` bytes of the documents; the last one is cut behind a line if it can."""
    left = limit
    for document in documents:
        if left is None:
            yield document
            continue
        raw = document.text.encode()
        if len(raw) <= left:
            left -= len(raw)
            yield document
            continue
        head = raw[:left].decode(errors="ignore")
        text = head[: head.rfind("\n") + 1] or head
        if text:
            yield replace(document, text=text)
        return
