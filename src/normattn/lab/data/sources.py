"""What data is read from: documents, corpora as values, their addresses, limits and splits."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, TypeVar, get_args
from urllib.parse import parse_qsl

from pydantic import Field, model_validator

from normattn.errors import InputError
from normattn.io import expand_path, file_identity, file_status
from normattn.settings import Settings

SplitName = Literal["train", "validation", "test"]
SPLITS: tuple[SplitName, ...] = get_args(SplitName)
T = TypeVar("T")


@dataclass(frozen=True)
class Document:
    """One piece of text, its name (unique inside its corpus), and what places it in a split.

    `split` is where the corpus itself puts it. Otherwise documents of one `group` are in one
    split; without a group a document is its own. `target` is its translation, `labels` are what it
    is labelled with, sorted.
    """

    name: str
    text: str
    group: str | None = None
    split: SplitName | None = None
    target: str = ""
    labels: tuple[str, ...] = ()

    @property
    def split_name(self) -> str:
        """The name by which the split is decided where the corpus does not say it."""
        return self.name if self.group is None else self.group


@dataclass(frozen=True)
class Corpus:
    """Documents and where they come from. They are streamed: all may be larger than the memory.

    - `documents(limit=None)`: in a fixed order, at most `limit` bytes of text in all; `InputError`
      where they are missing, unreadable or not UTF-8.
    - `fingerprint()`: a short hash that changes when the text (or what finds it) does; quick.
    - `given()`: the held-out splits of the corpus itself; others are cut from its training part.
    - `sources()`: what the text was taken from, each with its version, where there are versions.
    - `notes()`: what a plan says before anything is done, such as what is downloaded; `InputError`
      where a library that it needs is not installed.
    - `labels`: those of a classifier in the order of its outputs, () where none are listed.
    """

    documents: Callable[..., Iterator[Document]]
    fingerprint: Callable[[], str]
    given: Callable[[], tuple[SplitName, ...]] = tuple
    sources: Callable[[], dict[str, str]] = dict
    notes: Callable[[], tuple[str, ...]] = tuple
    labels: tuple[str, ...] = ()


# Files.


class Part(NamedTuple):
    """Files that are read together: what they are called, and the split that they are, if any."""

    name: str
    paths: tuple[Path, ...]
    split: SplitName | None = None


def file_corpus(
    parts: Sequence[Part],
    read: Callable[..., Iterable[Document]],
    rules: tuple[object, ...] = (),
    sift: Callable[[Iterator[Document]], Iterator[Document]] = iter,
    versions: Mapping[str, str] | None = None,
    labels: tuple[str, ...] = (),
) -> Corpus:
    """The documents that `read` finds in each part, in order; a limit takes parts evenly from all.

    `read` gets a part's name and files. `rules` decide how they are read, `versions` say of what
    the text is, and `sift` may leave documents out or group them. The fingerprint is a hash of
    names, of how they are read, and of what shows that a file was written to: a copy of a file has
    another; moving the folder that the names are relative to changes nothing.
    """
    versions = dict(versions or {})

    def documents(limit: int | None = None) -> Iterator[Document]:
        sizes = [sum(file_status(path).st_size for path in part.paths) for part in parts]
        found = (
            document if part.split is None else replace(document, split=part.split)
            for part in evenly(parts, sizes, limit)
            for document in read(part.name, *part.paths)
        )
        return sift(capped(found, limit))

    def fingerprint() -> str:
        digest = hashlib.sha256(repr((rules, labels, versions)).encode())
        for part in parts:
            states = [file_identity(file_status(path)) for path in part.paths]
            digest.update(repr((part.name, part.split, states)).encode())
        return digest.hexdigest()

    given = tuple(part.split for part in parts if part.split not in (None, "train"))
    return Corpus(documents, fingerprint, lambda: given, lambda: versions, labels=labels)


def without_repeats(
    documents: Iterable[Document], key: Callable[[str], str] = str
) -> Iterator[Document]:
    """Leave out documents whose text came before, as `key` sees it; a hash of each is held."""
    seen = set()
    for document in documents:
        digest = hashlib.sha256(key(document.text).encode("utf-8", "replace")).digest()
        if digest not in seen:
            seen.add(digest)
            yield document


def split_files(
    folder: Path, names: Mapping[SplitName, str], end: str, hint: str = ""
) -> dict[SplitName, Path]:
    """The file of each split in a folder, by patterns of its name and of its end.

    A split may have none. Raises `InputError`, which ends in `hint`, where a split has several.
    """
    found: dict[SplitName, Path] = {}
    for split, name in names.items():
        known = re.compile(f"(?:{name}){end}")
        files = [path for path in sorted(folder.iterdir()) if known.fullmatch(path.name)]
        if len(files) > 1:
            several = ", ".join(path.name for path in files)
            raise InputError(f"{folder} needs one {split} set, but has {several}{hint}")
        found.update((split, path) for path in files)
    return found


# Addresses.


Reader = Callable[[str, Mapping[str, Any], str], Document]
"""(name, row, where) → the document in a row; `where` begins the sentence about a mistake."""


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
        body, mark, query = text.rpartition("?")
        if not mark or expand_path(text).exists():
            return cls(text, {})
        try:
            pairs = parse_qsl(query, strict_parsing=True)
        except ValueError:
            pairs = []
        if not pairs or len(dict(pairs)) < len(pairs):
            raise InputError(
                f"{kind} {text!r}: expected ?option=value&… after the name, each option once"
            )
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


def evenly(files: Sequence[T], sizes: Sequence[int], limit: int | None) -> list[T]:
    """Those files, read whole, that make at most `limit` bytes, evenly from all; at least one.

    A file is read while what is kept lags behind its share of what was passed (error diffusion),
    so the choice is deterministic and does not favour the start of the alphabet.
    """
    total, seen, kept = sum(sizes), 0, 0
    if limit is None or total <= limit:
        return list(files)
    chosen = []
    for file, size in zip(files, sizes, strict=True):
        if size and kept * total <= limit * seen and kept + size <= limit:
            kept += size
            chosen.append(file)
        seen += size
    return chosen or list(files[:1])


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


# Splits.


class SplitSettings(Settings):
    """How data without splits of its own is split: the base of every configuration of data.

    - `test_fraction`, `validation_fraction`: shares of the items (default 0.1 and 0.05).
    - `seed`: decides which items these are (default 0).
    """

    test_fraction: float = Field(default=0.1, ge=0, lt=1)
    validation_fraction: float = Field(default=0.05, ge=0, lt=1)
    seed: int = Field(default=0, ge=0, lt=1 << 63)

    @model_validator(mode="after")
    def _leaves_training_data(self) -> SplitSettings:
        held_out = self.test_fraction + self.validation_fraction
        if held_out >= 1:
            raise ValueError(
                "test_fraction and validation_fraction leave nothing to train on: they add up to "
                f"{held_out:g} and must stay below 1"
            )
        return self

    @property
    def parsed(self) -> Corpus | None:
        """Where documents are read from, if they are; `InputError` where they are not there."""
        return None

    def look(self) -> tuple[str, ...]:
        """What a plan says of the data before anything is done; quick, no data is prepared.

        Raises `InputError` where the data, or a library that reads it, is plainly not there.
        """
        corpus = self.parsed
        return () if corpus is None else corpus.notes()

    def split_of(self, name: str, given: Collection[SplitName] = ()) -> SplitName:
        """The split of the item with this name; nothing is cut off for splits that are `given`."""
        test = 0.0 if "test" in given else self.test_fraction
        validation = 0.0 if "validation" in given else self.validation_fraction
        return split_of(name, self.seed, test, validation)


def split_of(name: str, seed: int, test: float, validation: float) -> SplitName:
    """The split of the item `name`: hashed to u in [0, 1), test first, then validation.

    Other items do not matter, so a corpus that grows keeps its split, and an item is in the test
    split of every larger `test` fraction too.
    """
    digest = hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=8).digest()
    u = int.from_bytes(digest, "big") / 2**64
    if u < test:
        return "test"
    return "validation" if u < test + validation else "train"


@dataclass(frozen=True)
class Splits(Generic[T]):
    """Data in three splits, one after another."""

    train: T
    validation: T
    test: T

    def __iter__(self) -> Iterator[T]:
        return iter((self.train, self.validation, self.test))

    def split(self, name: str) -> T:
        """The split called `name`; `InputError` for another name."""
        for known, split in zip(SPLITS, self, strict=True):
            if known == name:
                return split
        raise InputError(f"there is no split {name!r}: expected {', '.join(SPLITS)}")
