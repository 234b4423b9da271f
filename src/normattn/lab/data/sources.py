"""Documents, corpora, their addresses, size limits and splits."""

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
    """A text with a name that is unique in its corpus.

    `split` is set if the corpus defines it. Otherwise a hash of `split_key` decides: documents of
    one `group` are in the same split. `target` is a translation, `labels` are sorted class names.
    """

    name: str
    text: str
    group: str | None = None
    split: SplitName | None = None
    target: str = ""
    labels: tuple[str, ...] = ()

    @property
    def split_key(self) -> str:
        """The string whose hash decides the split: the group if there is one, else the name."""
        return self.name if self.group is None else self.group


RowReader = Callable[[str, Mapping[str, Any], str], Document]
"""(name, row, where) → the document in a row; `where` starts error messages."""


@dataclass(frozen=True)
class Corpus:
    """A stream of documents. It may be larger than memory.

    - `documents(limit=None)`: at most `limit` bytes of text in a fixed order; `InputError` if they
      are missing, unreadable or not UTF-8.
    - `fingerprint()`: a short hash that changes with the text; fast.
    - `own_splits()`: the held-out splits that the corpus defines. Others are cut from the rest.
    - `sources()`: the version of each source of the text, if there are versions.
    - `notes()`: lines for a plan, such as what is downloaded; `InputError` if a library is missing.
    - `labels`: the labels of a classifier in the order of its outputs, () if not listed.
    """

    documents: Callable[..., Iterator[Document]]
    fingerprint: Callable[[], str]
    own_splits: Callable[[], tuple[SplitName, ...]] = tuple
    sources: Callable[[], dict[str, str]] = dict
    notes: Callable[[], tuple[str, ...]] = tuple
    labels: tuple[str, ...] = ()


def parse_address(text: str, kind: str = "corpus") -> tuple[str, dict[str, str]]:
    """Return body and options of `body` or `body?option=value&…`. A path may contain a `?`."""
    if not text.strip():
        raise InputError(f"the {kind} has no name")
    body, mark, query = text.rpartition("?")
    if not mark or expand_path(text).exists():
        return text, {}
    try:
        pairs = parse_qsl(query, strict_parsing=True)
    except ValueError:
        pairs = []
    if not pairs or len(dict(pairs)) < len(pairs):
        raise InputError(f"{kind} {text!r}: expected ?option=value&…, each option once")
    return body, dict(pairs)


def check_options(body: str, options: Iterable[str], *known: str) -> None:
    """Raise `InputError` for an option of a corpus that is not `known`."""
    for name in options:
        if name not in known:
            lists = f"it knows {', '.join(known)}" if known else "it takes none"
            raise InputError(f"corpus {body!r} has no option {name!r}: {lists}")


class FileGroup(NamedTuple):
    """Files that are read together, their name, and their split if they form one."""

    name: str
    paths: tuple[Path, ...]
    split: SplitName | None = None


def file_corpus(
    groups: Sequence[FileGroup],
    read: Callable[..., Iterable[Document]],
    rules: tuple[object, ...] = (),
    select: Callable[[Iterator[Document]], Iterator[Document]] = iter,
    versions: Mapping[str, str] | None = None,
    labels: tuple[str, ...] = (),
) -> Corpus:
    """Return the corpus of the documents that `read(name, *paths)` finds in each group, in order.

    A byte limit takes whole groups evenly from all. `select` may drop or group documents. The
    fingerprint hashes the names, `rules` (how files are read), `labels`, `versions` and the
    files' identities. So a copied file counts as changed, but a moved folder does not.
    """
    versions = dict(versions or {})

    def documents(limit: int | None = None) -> Iterator[Document]:
        sizes = [sum(file_status(path).st_size for path in group.paths) for group in groups]
        sampled = (
            document if group.split is None else replace(document, split=group.split)
            for group in sample_evenly(groups, sizes, limit)
            for document in read(group.name, *group.paths)
        )
        return select(limit_bytes(sampled, limit))

    def fingerprint() -> str:
        digest = hashlib.sha256(repr((rules, labels, versions)).encode())
        for group in groups:
            identities = [file_identity(file_status(path)) for path in group.paths]
            digest.update(repr((group.name, group.split, identities)).encode())
        return digest.hexdigest()

    own_splits = tuple(group.split for group in groups if group.split not in (None, "train"))
    return Corpus(documents, fingerprint, lambda: own_splits, lambda: versions, labels=labels)


def drop_repeats(
    documents: Iterable[Document], normalise: Callable[[str], str] = str
) -> Iterator[Document]:
    """Drop documents whose normalised text occurred before. Keeps a hash of each in memory."""
    seen = set()
    for document in documents:
        digest = hashlib.sha256(normalise(document.text).encode("utf-8", "replace")).digest()
        if digest not in seen:
            seen.add(digest)
            yield document


def split_files(
    folder: Path, patterns: Mapping[SplitName, str], ending: str, hint: str = ""
) -> dict[SplitName, Path]:
    """Return the file of each split in a folder, by regular expressions of its stem and ending.

    A split may be missing. Raises `InputError`, which ends in `hint`, if a split has several files.
    """
    files: dict[SplitName, Path] = {}
    for split, pattern in patterns.items():
        name = re.compile(f"(?:{pattern}){ending}")
        matches = [path for path in sorted(folder.iterdir()) if name.fullmatch(path.name)]
        if len(matches) > 1:
            several = ", ".join(path.name for path in matches)
            raise InputError(f"{folder} needs one {split} set, but has {several}{hint}")
        files.update((split, path) for path in matches)
    return files


def sample_evenly(files: Sequence[T], sizes: Sequence[int], limit: int | None) -> list[T]:
    """Return whole files of at most `limit` bytes in all, evenly from the list; at least one.

    A file is taken while the taken bytes lag behind their share of the passed bytes (error
    diffusion). The choice is deterministic and does not favour the start of the alphabet.
    """
    total, passed, taken = sum(sizes), 0, 0
    if limit is None or total <= limit:
        return list(files)
    chosen = []
    for file, size in zip(files, sizes, strict=True):
        if size and taken * total <= limit * passed and taken + size <= limit:
            taken += size
            chosen.append(file)
        passed += size
    return chosen or list(files[:1])


def limit_bytes(documents: Iterable[Document], limit: int | None) -> Iterator[Document]:
    """Yield the first `limit` bytes of the documents. The last one is cut at a line end if any."""
    if limit is None:
        yield from documents
        return
    for document in documents:
        raw = document.text.encode()
        if len(raw) > limit:
            head = raw[:limit].decode(errors="ignore")
            if text := head[: head.rfind("\n") + 1] or head:
                yield replace(document, text=text)
            return
        limit -= len(raw)
        yield document


class SplitSettings(Settings):
    """How data without splits is split; the base of every data configuration.

    - `test_fraction`, `validation_fraction`: shares of the items (default 0.1 and 0.05).
    - `seed`: decides which items these are (default 0).
    """

    test_fraction: float = Field(default=0.1, ge=0, lt=1)
    validation_fraction: float = Field(default=0.05, ge=0, lt=1)
    seed: int = Field(default=0, ge=0, lt=1 << 63)

    @model_validator(mode="after")
    def _leaves_training_data(self) -> SplitSettings:
        if self.test_fraction + self.validation_fraction >= 1:
            raise ValueError("test_fraction + validation_fraction leave nothing to train on")
        return self

    def open_corpus(self) -> Corpus | None:
        """Return the corpus, None if there is none to read; `InputError` if it does not exist."""
        return None

    def refuse_changed(self, corpus: str, *names: str) -> None:
        """Raise `InputError` where one of `names`, without meaning for the corpus, was changed."""
        for name in names:
            if getattr(self, name) != type(self).model_fields[name].default:
                raise InputError(f"{name} has no meaning for the corpus {corpus}")

    def plan_notes(self) -> tuple[str, ...]:
        """Return lines for a plan, fast; `InputError` if the data, or a library, is missing."""
        corpus = self.open_corpus()
        return () if corpus is None else corpus.notes()

    def split_of(self, key: str, own_splits: Collection[SplitName] = ()) -> SplitName:
        """Return the split of an item. Nothing is cut off for splits that the corpus defines."""
        test = 0.0 if "test" in own_splits else self.test_fraction
        validation = 0.0 if "validation" in own_splits else self.validation_fraction
        return split_of(key, self.seed, test, validation)


def split_of(key: str, seed: int, test: float, validation: float) -> SplitName:
    """Return the split of the item `key`: hashed to u in [0, 1), test first, then validation.

    It does not depend on other items, so a growing corpus keeps its split. A larger `test`
    fraction keeps the items of a smaller one.
    """
    # The name of a file may hold bytes that are not UTF-8.
    name = f"{seed}\0{key}".encode(errors="surrogateescape")
    u = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big") / 2**64
    if u < test:
        return "test"
    return "validation" if u < test + validation else "train"


@dataclass(frozen=True)
class Splits(Generic[T]):
    """Data in three splits; iterating gives them in this order."""

    train: T
    validation: T
    test: T

    def __iter__(self) -> Iterator[T]:
        return iter((self.train, self.validation, self.test))

    def split(self, name: str) -> T:
        """Return the split called `name`; `InputError` for another name."""
        if name not in SPLITS:
            raise InputError(f"there is no split {name!r}: expected {', '.join(SPLITS)}")
        return dict(zip(SPLITS, self, strict=True))[name]
