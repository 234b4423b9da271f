"""What data is read from: documents, corpora as values, addresses, the hub, limits in bytes."""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qsl

from normattn.errors import InputError, library, need
from normattn.io import expanded, identity, stat_of
from normattn.lab.data.splits import SPLITS, SplitName

File = TypeVar("File")


@dataclass(frozen=True)
class Document:
    """One piece of text, its name (unique inside its corpus), and what places it in a split.

    `split` is where the corpus itself puts it. Otherwise documents of one `group` stand in one
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


class Corpus(ABC):
    """Documents, as a value. They are always streamed: all may be larger than the memory."""

    @abstractmethod
    def documents(self, limit: int | None = None) -> Iterator[Document]:
        """Yield the documents in a fixed order, at most `limit` bytes of text in all.

        Raises `InputError` where they are missing, unreadable or not UTF-8.
        """

    @abstractmethod
    def fingerprint(self) -> str:
        """A short hash that changes when the text (or what finds it) changes; cheap to make."""

    def given(self) -> tuple[SplitName, ...]:
        """The held-out splits that the corpus itself has; others are cut from its training part."""
        return ()

    def labels(self) -> tuple[str, ...]:
        """Every label in the order of a classifier's outputs; () where the corpus lists none."""
        return ()

    def sources(self) -> dict[str, str]:
        """What the text was taken from, each with its version; empty where nothing is versioned."""
        return {}

    def notes(self) -> tuple[str, ...]:
        """What a plan says of the corpus before anything is done: what is fetched, what it needs.

        Raises `InputError` where a library that it needs is not installed.
        """
        return ()


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


def stamp(files: Mapping[str, Path], *rules: object) -> str:
    """Hash of the files' names, of what shows that one was written to, and of how they are read.

    A copy of a file has another; moving the folder that the names are relative to changes nothing.
    """
    digest = hashlib.sha256(repr(rules).encode())
    for name, path in files.items():
        digest.update(repr((name, *identity(stat_of(path)))).encode())
    return digest.hexdigest()


# Data sets of the Hugging Face hub.

PREFIX = "hf:"
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class HubCorpus(Corpus):
    """`hf:NAME[?config=…&split=…&revision=…]`: the rows of a data set, a document each.

    It is of one commit: that of `revision`, else the newest of that branch or of main. The commit
    is part of the fingerprint and of the sources, so a data set that changed on the hub is never
    an old one from the cache. Rows are those of `split` (default train), and with `held_out` also
    those of its own validation and test splits where the address names no split. `options` are
    further ones that the address may have. Needs the `datasets` library (extra `data`).
    """

    address: Address
    read: Reader
    held_out: bool = False
    options: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.address.take("config", "split", *self.options, "revision")
        if not self._name:
            raise InputError("corpus 'hf:' names no dataset: expected hf:NAME, such as hf:me/data")

    def documents(self, limit: int | None = None) -> Iterator[Document]:
        """Stream the rows."""
        return capped(self._rows(), limit)

    def _rows(self) -> Iterator[Document]:
        load = library("datasets", self._lacking).load_dataset
        first, given = self.address.options.get("split", "train"), self.given()
        for split in (first, *given):
            start = f"{split}:" if split in given else ""
            try:
                options = {"split": split, "revision": self.commit(), "streaming": True}
                rows = load(self._name, self.address.options.get("config"), **options)
                for number, row in enumerate(rows):
                    where = f"corpus '{self.address}', {split} row {number}"
                    document = self.read(f"{start}{number:09}", row, where)
                    held_out = next((name for name in given if name == split), None)
                    yield replace(document, split=held_out) if held_out else document
            except InputError:
                raise
            except Exception as error:  # whatever the client raises, the user gets a sentence
                raise self._failed(error) from error

    def given(self) -> tuple[SplitName, ...]:
        """The held-out splits that the data set has, where the address names none itself."""
        if not self.held_out or "split" in self.address.options:
            return ()
        names = library("datasets", self._lacking).get_dataset_split_names
        try:
            config = self.address.options.get("config")
            there = names(self._name, config, revision=self.commit())
        except Exception as error:  # as above
            raise self._failed(error) from error
        return tuple(name for name in SPLITS[1:] if name in there)

    def commit(self) -> str:
        """The commit, which is looked up on the hub where `revision` is none."""
        revision = self.address.options.get("revision")
        if revision is not None and _COMMIT.fullmatch(revision):
            return revision
        hub = library("huggingface_hub", self._lacking)
        try:
            return _newest_commit(hub, self._name, revision)
        except Exception as error:  # as above
            raise self._failed(error, "; ?revision=COMMIT needs no look at the hub") from error

    def fingerprint(self) -> str:
        """Hash of the address and of the commit."""
        return hashlib.sha256(f"{self.address} {self.commit()}".encode()).hexdigest()

    def sources(self) -> dict[str, str]:
        """The commit of the data set."""
        return {self.address.body: self.commit()}

    def notes(self) -> tuple[str, ...]:
        """The rows come over the network; `InputError` where datasets is not installed."""
        need("datasets", self._lacking)
        return (f"the corpus {self.address} is read from the hub, over the network",)

    @property
    def _name(self) -> str:
        return self.address.body.removeprefix(PREFIX)

    @property
    def _lacking(self) -> str:
        return f"corpus '{self.address}' needs the datasets library: pip install 'normattn[data]'"

    def _failed(self, error: Exception, more: str = "") -> InputError:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return InputError(
            f"corpus '{self.address}' cannot be read from the hub: {reason}; check its name, "
            f"config and split and the network, or give a local file{more}"
        )


@cache
def _newest_commit(hub: Any, name: str, revision: str | None) -> str:
    """The commit of a branch or tag; asked for once, so that one process reads one text."""
    return str(hub.HfApi().dataset_info(name, revision=revision).sha)


# Limits.


def shares(sizes: Sequence[int], limit: int | None, whole: int | None = None) -> list[int]:
    """How many bytes of each of several files to read, so that `limit` comes evenly from all.

    Files of up to `whole` bytes (default: a sixteenth of the limit) are read whole or not: one is
    read while what is kept lags behind its share of what was passed (error diffusion), so the
    choice is deterministic and does not favour the start of the alphabet. Of a larger one what is
    due with it is read, at least `whole`: one large file among small ones is cut, not passed over.
    """
    total = sum(sizes)
    if limit is None or total <= limit:
        return list(sizes)
    whole = max(1, limit // 16 if whole is None else whole)
    seen = kept = 0
    parts = []
    for size in sizes:
        behind = kept * total <= limit * seen
        seen += size
        due = limit * seen // total - kept
        if size <= whole:
            parts.append(size if behind and kept + size <= limit else 0)
        else:
            parts.append(min(size, due) if due >= whole else 0)
        kept += parts[-1]
    return parts


def evenly(files: Sequence[File], sizes: Sequence[int], limit: int | None) -> list[File]:
    """Those files, read whole, that make about `limit` bytes, evenly from all; at least one."""
    parts = shares(sizes, limit, whole=max(sizes, default=0))
    return [file for file, part in zip(files, parts, strict=True) if part] or list(files[:1])


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
