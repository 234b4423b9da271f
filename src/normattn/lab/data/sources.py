"""What data is read from: documents, splits, corpora as values, addresses, the hub, limits."""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, starmap
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, get_args
from urllib.parse import parse_qsl

from pydantic import Field, model_validator

from normattn.errors import InputError, library, need
from normattn.io import expanded, identity, stat_of
from normattn.settings import Settings

SplitName = Literal["train", "validation", "test"]
SPLITS: tuple[SplitName, ...] = get_args(SplitName)
T = TypeVar("T")


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
    def rows(self) -> Iterator[Document]:
        """Yield every document in a fixed order.

        Raises `InputError` where they are missing, unreadable or not UTF-8.
        """

    def documents(self, limit: int | None = None) -> Iterator[Document]:
        """Yield the documents, at most `limit` bytes of text in all."""
        return capped(self.rows(), limit)

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


@dataclass(frozen=True)
class FileCorpus(Corpus):
    """The documents that `read` finds in each of some files, in the order of `files`.

    `files` are paths by name, `rules` what decides how they are read, `held_out` the splits that
    the files themselves have. A limit takes whole files, evenly from all.
    """

    files: Mapping[str, Path]
    read: Callable[[str, Path], Iterator[Document]]
    rules: tuple[object, ...] = ()
    held_out: tuple[SplitName, ...] = ()

    def rows(self) -> Iterator[Document]:
        """Stream the documents, file by file."""
        return self.documents()

    def documents(self, limit: int | None = None) -> Iterator[Document]:
        """Stream the documents of the files that the limit leaves."""
        files = list(self.files.items())
        chosen = evenly(files, [stat_of(path).st_size for _, path in files], limit)
        return capped(chain.from_iterable(starmap(self.read, chosen)), limit)

    def given(self) -> tuple[SplitName, ...]:
        """The held-out splits that have files."""
        return self.held_out

    def fingerprint(self) -> str:
        """Hash of the names, of what shows that a file was written to, and of how they are read.

        A copy of a file has another; moving the folder that the names are relative to changes
        nothing.
        """
        digest = hashlib.sha256(repr(self.rules).encode())
        for name, path in self.files.items():
            digest.update(repr((name, *identity(stat_of(path)))).encode())
        return digest.hexdigest()


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
            pairs = parse_qsl(query, strict_parsing=True)
        except ValueError as error:
            raise InputError(
                f"{kind} {text!r}: expected ?option=value&… behind the name"
            ) from error
        options = dict(pairs)
        if len(options) < len(pairs):
            raise InputError(f"{kind} {text!r}: an option is given more than once")
        return cls(body, options)

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

    def rows(self) -> Iterator[Document]:
        """Stream the rows."""
        load, given = library("datasets", self._lacking).load_dataset, self.given()
        for split in (self.address.options.get("split", "train"), *given):
            start = f"{split}:" if split in given else ""
            held_out = next((name for name in given if name == split), None)
            options = {"split": split, "revision": self.commit(), "streaming": True}
            with self._reading():
                rows = load(self._name, self.address.options.get("config"), **options)
                for number, row in enumerate(rows):
                    where = f"corpus '{self.address}', {split} row {number}"
                    document = self.read(f"{start}{number:09}", row, where)
                    yield replace(document, split=held_out) if held_out else document

    def given(self) -> tuple[SplitName, ...]:
        """The held-out splits that the data set has, where the address names none itself."""
        if not self.held_out or "split" in self.address.options:
            return ()
        names = library("datasets", self._lacking).get_dataset_split_names
        config = self.address.options.get("config")
        with self._reading():
            there = names(self._name, config, revision=self.commit())
        return tuple(name for name in SPLITS[1:] if name in there)

    def commit(self) -> str:
        """The commit, which is looked up on the hub where `revision` is none."""
        revision = self.address.options.get("revision")
        if revision is not None and _COMMIT.fullmatch(revision):
            return revision
        hub = library("huggingface_hub", self._lacking)
        with self._reading("; ?revision=COMMIT needs no look at the hub"):
            return _newest_commit(hub, self._name, revision)

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

    @contextmanager
    def _reading(self, advice: str = "") -> Iterator[None]:
        """Turn whatever the hub's client raises into one sentence."""
        try:
            yield
        except InputError:
            raise
        except Exception as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise InputError(
                f"corpus '{self.address}' cannot be read from the hub: {reason}; check its name, "
                f"config and split and the network, or give a local file{advice}"
            ) from error


@cache
def _newest_commit(hub: Any, name: str, revision: str | None) -> str:
    """The commit of a branch or tag; asked for once, so that one process reads one text."""
    return str(hub.HfApi().dataset_info(name, revision=revision).sha)


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
