"""Corpora by address: the standard library, packages, a path, a dataset of the hub."""

from __future__ import annotations

import difflib
import hashlib
import os
import platform
import re
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from normattn.errors import InputError, library, need
from normattn.io import expanded, identity, open_file, refuse_irregular, stat_of
from normattn.lab.data.frozen_packages import FrozenPackages
from normattn.lab.data.packages import PythonPackages
from normattn.lab.data.sources import (
    Corpus,
    Document,
    address,
    capped,
    evenly,
    shares,
    split_address,
    take_options,
)
from normattn.lab.data.text_files import (
    LINES,
    PIECE_CHARACTERS,
    TABLES,
    TEXT,
    decode_python,
    documents_of,
    is_packed,
    read_text,
    suffix_of,
)

__all__ = ["Corpus", "Document", "HubCorpus", "PathCorpus", "PythonSource", "parse_corpus"]

WHOLE_BYTES = 1 << 20
"""A text file in a folder is one document up to this size, and cut like a single file beyond."""
# `encodings` is a hundred tables from one template: they would stand on both sides of a split.
_LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings"})
_HUB = "hf:"
_COMMIT = re.compile(r"[0-9a-f]{40}")


def parse_corpus(text: str) -> Corpus:
    """The corpus that an address names: `body` or `body?option=value&…`.

    `python-source`, `python-packages-2026`, `python-packages`, the path of a file or a folder, or
    `hf:NAME`. Raises `InputError` for anything else, with the nearest name, and for options that
    the kind does not know.
    """
    kinds = (PythonSource, FrozenPackages, PythonPackages, HubCorpus, PathCorpus)
    body, options = split_address(text)
    for kind in kinds:
        if kind.claims(body):
            return kind.parse(body, options)
    named = [kind.kind for kind in kinds[:3]]
    near = difflib.get_close_matches(body, named, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise InputError(
        f"corpus {body!r} does not exist: {hint}expected {', '.join(named)}, the path of a file "
        "or folder, or hf:NAME"
    )


class _File(NamedTuple):
    name: str
    path: Path
    size: int

    @property
    def is_text(self) -> bool:
        """Whether it is plain text; what has an unknown suffix is."""
        return suffix_of(self.path) not in LINES | TABLES


@dataclass(frozen=True)
class PathCorpus(Corpus):
    """The text under a path.

    A single text file is cut at line ends into documents of about 32 kB. In a folder (read
    recursively, in the order of the relative names, hidden files and unknown suffixes left out) a
    text file is one document unless it is larger than 1 MB or packed. Every line of a JSON-lines
    file and every row of a Parquet, CSV or TSV file is a document; `field` (default `text`) says
    where its text is. Names are
    relative to the path, so that the split does not depend on where the folder lies. Documents of
    equal text stand in one split, that of the first of them.
    """

    path: str
    field: str | None = None

    kind: ClassVar[str] = "path"

    @classmethod
    def claims(cls, body: str) -> bool:
        """Every path that exists."""
        return expanded(body).exists()

    @classmethod
    def parse(cls, body: str, options: Mapping[str, str]) -> PathCorpus:
        """`PATH` or `PATH?field=NAME`."""
        return cls(body, take_options(body, options, ["field"])["field"])

    def documents(self, limit: int | None = None) -> Iterator[Document]:
        """Stream the documents; a limit takes evenly from the files of a folder."""
        files = self._files()
        parts = shares([file.size for file in files], limit)
        texts = (
            # Only what is cut: a packed file's size is not that of its text.
            self._read(file) if part == file.size else capped(self._read(file), part)
            for file, part in zip(files, parts, strict=True)
            if part or not file.size
        )
        return _together(capped(chain.from_iterable(texts), limit))

    def fingerprint(self) -> str:
        """Hash of relative names, of what tells that a file was written to, and of how it is cut.

        A copy of the folder has another, and moving it leaves it as it is.
        """
        rules = (self.kind, self.field, WHOLE_BYTES, PIECE_CHARACTERS, "equal texts together")
        digest = hashlib.sha256(repr(rules).encode())
        for file in self._files():
            digest.update(repr((file.name, *identity(stat_of(file.path)))).encode())
        return digest.hexdigest()

    def total_bytes(self) -> int | None:
        """The size of the text files; None with packed or tabular ones."""
        files = self._files()
        if not all(file.is_text and not is_packed(file.path) for file in files):
            return None
        return sum(file.size for file in files)

    def __str__(self) -> str:
        return address(self.path, field=self.field)

    def _read(self, file: _File) -> Iterator[Document]:
        # A packed file's size says nothing about the text's.
        small = file.size <= WHOLE_BYTES and not is_packed(file.path)
        if file.is_text and small and self._root.is_dir():
            return iter([Document(file.name, read_text(file.path))])
        return documents_of(file.path, file.name, self.field or "text")

    @property
    def _root(self) -> Path:
        return expanded(self.path)

    def _files(self) -> list[_File]:
        root = self._root
        if not root.exists():
            raise InputError(f"corpus {self.path!r} does not exist")
        files = self._folder(root) if root.is_dir() else [_File(root.name, root, _size(root))]
        if self.field is not None and all(file.is_text for file in files):
            raise InputError(f"corpus {str(self)!r}: plain text has no fields; leave out ?field=")
        return files

    def _folder(self, root: Path) -> list[_File]:
        known = TEXT | LINES | TABLES
        files = [
            _File(path.relative_to(root).as_posix(), path, _size(path))
            for path in _walk(root)
            if suffix_of(path) in known
        ]
        if not files:
            suffixes = " ".join(sorted(known))
            raise InputError(
                f"corpus {self.path!r} holds no file of a known kind (suffixes: {suffixes})"
            )
        return sorted(files, key=lambda file: file.name)


def _together(documents: Iterable[Document]) -> Iterator[Document]:
    """The documents, each that repeats a text in the group of the first that has it.

    Otherwise a text could be tested that was trained on. A first one is its own, so that a corpus
    without repetitions is divided by names alone. Held are a hash and a name for each.
    """
    firsts: dict[bytes, str] = {}
    for document in documents:
        digest = hashlib.blake2b(document.text.encode("utf-8", "replace"), digest_size=12).digest()
        first = firsts.setdefault(digest, document.split_name)
        yield document if first == document.split_name else replace(document, group=first)


def _walk(root: Path) -> Iterator[Path]:
    """Every file that is not hidden; a folder that cannot be listed is an error, not a gap."""

    def refuse(error: OSError) -> None:
        raise InputError(f"{error.filename} cannot be read: {error.strerror}") from error

    for folder, folders, names in os.walk(root, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(folder, name) for name in names if not name.startswith("."))


def _size(path: Path) -> int:
    """The size of a regular file; a pipe or a device among the files is named, not passed over."""
    status = stat_of(path)
    refuse_irregular(path, status.st_mode)
    return status.st_size


@dataclass(frozen=True)
class PythonSource(Corpus):
    """Every `*.py` of the standard library without tests, `encodings` and installed packages.

    Sorted by name; of files with the same content only the first is kept. A document is a file,
    its name the path relative to the library. The text depends on the Python version, which is
    part of the fingerprint.
    """

    kind: ClassVar[str] = "python-source"

    @classmethod
    def claims(cls, body: str) -> bool:
        """Exactly `python-source`."""
        return body == cls.kind

    @classmethod
    def parse(cls, body: str, options: Mapping[str, str]) -> PythonSource:
        """`python-source`; there are no options."""
        take_options(body, options, [])
        return cls()

    def documents(self, limit: int | None = None) -> Iterator[Document]:
        """Stream the files; a limit takes evenly from the whole library."""
        files = _library_files()
        chosen = evenly(files, [path.stat().st_size for _, path in files], limit)
        return capped(_unique(chosen), limit)

    def fingerprint(self) -> str:
        """Hash of the Python version and every file's name and content (12 MB: 30 ms)."""
        digest = hashlib.sha256(f"{self.kind} {platform.python_version()}".encode())
        for name, path in _library_files():
            digest.update(f"{name}\0".encode() + hashlib.sha256(_bytes(path)).digest())
        return digest.hexdigest()

    def total_bytes(self) -> int | None:
        """The size of all files."""
        return sum(path.stat().st_size for _, path in _library_files())

    def sources(self) -> dict[str, str]:
        """The Python version."""
        return {"python": platform.python_version()}

    def __str__(self) -> str:
        return self.kind


def _library_files() -> list[tuple[str, Path]]:
    root = Path(sysconfig.get_path("stdlib"))
    paths = [path.relative_to(root) for path in root.rglob("*.py")]
    files = sorted(
        (path.as_posix(), root / path) for path in paths if not _LEFT_OUT.intersection(path.parts)
    )
    if not files:
        raise InputError(
            f"python-source finds no *.py under {root}: this Python ships its library without "
            "source; give a file or a folder of text instead"
        )
    return files


def _unique(files: list[tuple[str, Path]]) -> Iterator[Document]:
    seen = set()
    for name, path in files:
        raw = _bytes(path)
        digest = hashlib.sha256(raw).digest()
        if digest not in seen:
            seen.add(digest)
            yield Document(name, _decoded(raw, path))


def _bytes(path: Path) -> bytes:
    with open_file(path) as file:
        return file.read()


def _decoded(raw: bytes, path: Path) -> str:
    try:
        return decode_python(raw)
    except (SyntaxError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not encoded as Python source must be: {error}") from error


@dataclass(frozen=True)
class HubCorpus(Corpus):
    """`hf:NAME[?config=..&split=train&field=text&revision=..]`; a row is a document.

    Needs the `datasets` library (extra `data`) and a network. The text is that of one commit: of
    `revision` where that is a commit, else of the newest one of that branch (default: the main
    one). The commit is part of the fingerprint and of the sources, so a dataset that changed on
    the hub is another text, never an old one from the cache.
    """

    name: str
    config: str | None = None
    split: str | None = None
    field: str | None = None
    revision: str | None = None

    kind: ClassVar[str] = "hf"

    @classmethod
    def claims(cls, body: str) -> bool:
        """Every address that starts with `hf:`."""
        return body.startswith(_HUB)

    @classmethod
    def parse(cls, body: str, options: Mapping[str, str]) -> HubCorpus:
        """Split the address into name and options."""
        name = body.removeprefix(_HUB)
        if not name:
            raise InputError("corpus 'hf:' names no dataset: expected hf:NAME, such as hf:me/data")
        return cls(name, **take_options(body, options, ["config", "split", "field", "revision"]))

    def documents(self, limit: int | None = None) -> Iterator[Document]:
        """Stream the rows; names are the row numbers."""
        return capped(self._rows(), limit)

    def fingerprint(self) -> str:
        """Hash of the address and of the commit, which is looked up on the hub."""
        return hashlib.sha256(f"{self} {self._commit()}".encode()).hexdigest()

    def sources(self) -> dict[str, str]:
        """The commit of the dataset."""
        return {_HUB + self.name: self._commit()}

    def total_bytes(self) -> int | None:
        """Not known."""
        return None

    def __str__(self) -> str:
        return address(
            _HUB + self.name,
            config=self.config,
            split=self.split,
            field=self.field,
            revision=self.revision,
        )

    def notes(self) -> tuple[str, ...]:
        """The rows come over the network; `InputError` where datasets is not installed."""
        need("datasets", self._lacking)
        return (f"the corpus {self} is read from the hub, over the network",)

    def _commit(self) -> str:
        if self.revision is not None and _COMMIT.fullmatch(self.revision):
            return self.revision
        hub = library("huggingface_hub", self._lacking)
        try:
            return _newest_commit(hub, self.name, self.revision)
        except Exception as error:  # whatever the hub's client raises, the user gets a sentence
            raise self._failed(error, "; ?revision=COMMIT needs no look at the hub") from error

    @property
    def _lacking(self) -> str:
        return f"corpus {str(self)!r} needs the datasets library: pip install 'normattn[data]'"

    def _rows(self) -> Iterator[Document]:
        load = library("datasets", self._lacking).load_dataset
        field = self.field or "text"
        named = {"split": self.split or "train", "revision": self._commit()}
        try:
            rows = load(self.name, self.config, **named, streaming=True)
            for number, row in enumerate(rows):
                yield Document(f"{number:09}", self._text(row, number, field))
        except InputError:
            raise
        except Exception as error:  # whatever the hub's client raises, the user gets a sentence
            raise self._failed(error) from error

    def _failed(self, error: Exception, more: str = "") -> InputError:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return InputError(
            f"corpus {str(self)!r} cannot be read from the hub: {reason}; check its name, config "
            f"and split and the network, or give a local file{more}"
        )

    def _text(self, row: Mapping[str, Any], number: int, field: str) -> str:
        if field not in row:
            fields = ", ".join(map(repr, row))
            raise InputError(
                f"corpus {str(self)!r} has no field {field!r} (its fields: {fields}); "
                "choose with ?field="
            )
        text = row[field]
        if not isinstance(text, str):
            kind = type(text).__name__
            raise InputError(
                f"corpus {str(self)!r}, row {number}: field {field!r} is not text but a {kind}"
            )
        return text


@cache
def _newest_commit(hub: Any, name: str, revision: str | None) -> str:
    """The commit of a branch or tag; asked for once, so that one process reads one text."""
    return str(hub.HfApi().dataset_info(name, revision=revision).sha)
