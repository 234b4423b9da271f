"""What data is read from: corpora as values, addresses, data sets of the hub, limits in bytes."""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeVar
from urllib.parse import parse_qsl

from normattn.errors import InputError, library, need
from normattn.io import expanded
from normattn.lab.data.splits import SPLITS, SplitName

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


# Data sets of the Hugging Face hub.

PREFIX = "hf:"
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class HubRows:
    """A data set of one commit: that of `revision`, else the newest of that branch or of main.

    Needs the `datasets` library (extra `data`) and a network. The commit is part of the fingerprint
    and of the sources, so a data set that changed on the hub is never an old one from the cache.
    """

    address: Address
    name: str
    config: str | None = None
    split: str | None = None
    revision: str | None = None

    @classmethod
    def parse(cls, address: Address, *more: str) -> HubRows:
        """Read an address that starts with `hf:`; `more` are options that the caller reads."""
        name = address.body.removeprefix(PREFIX)
        if not name:
            raise InputError("corpus 'hf:' names no dataset: expected hf:NAME, such as hf:me/data")
        options = address.take("config", "split", *more, "revision")
        return cls(address, name, options["config"], options["split"], options["revision"])

    def rows(self, split: str = "train") -> Iterator[dict[str, Any]]:
        """Stream the rows of the address's split, else of `split`."""
        load = library("datasets", self._lacking).load_dataset
        split = self.split or split
        try:
            options = {"split": split, "revision": self.commit(), "streaming": True}
            yield from load(self.name, self.config, **options)
        except InputError:
            raise
        except Exception as error:  # whatever the hub's client raises, the user gets a sentence
            raise self._failed(error) from error

    def splits(self) -> list[SplitName]:
        """The held-out splits that the data set has, where the address names none itself."""
        if self.split is not None:
            return []
        names = library("datasets", self._lacking).get_dataset_split_names
        try:
            there = names(self.name, self.config, revision=self.commit())
        except Exception as error:  # as above
            raise self._failed(error) from error
        return [name for name in SPLITS[1:] if name in there]

    def commit(self) -> str:
        """The commit, which is looked up on the hub where `revision` is none."""
        if self.revision is not None and _COMMIT.fullmatch(self.revision):
            return self.revision
        hub = library("huggingface_hub", self._lacking)
        try:
            return _newest_commit(hub, self.name, self.revision)
        except Exception as error:  # as above
            raise self._failed(error, "; ?revision=COMMIT needs no look at the hub") from error

    def fingerprint(self) -> str:
        """Hash of the address and of the commit."""
        return hashlib.sha256(f"{self.address} {self.commit()}".encode()).hexdigest()

    def notes(self) -> tuple[str, ...]:
        """The rows come over the network; `InputError` where datasets is not installed."""
        need("datasets", self._lacking)
        return (f"the corpus {self.address} is read from the hub, over the network",)

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
