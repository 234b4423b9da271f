"""Corpora by address: the standard library, pinned packages, a path, a data set of the hub."""

from __future__ import annotations

import difflib
import hashlib
import os
import platform
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from normattn.errors import InputError
from normattn.io import expanded, open_file, refuse_irregular, stat_of
from normattn.lab.data.frozen_packages import FROZEN, FrozenPackages
from normattn.lab.data.sources import (
    PREFIX,
    Address,
    Corpus,
    Document,
    HubCorpus,
    Reader,
    SplitName,
    capped,
    evenly,
    stamp,
)
from normattn.lab.data.text_files import (
    ROWS,
    TEXT,
    decode_python,
    is_packed,
    read_rows,
    read_text,
    suffix_of,
    text_of,
    text_pieces,
)

__all__ = ["Corpus", "Document", "PathCorpus", "PythonSource", "RowFiles", "parse_corpus"]

PYTHON_SOURCE = "python-source"
WHOLE_BYTES = 1 << 20
"""A text file in a folder is one document up to this size, and cut like a single file beyond."""
PIECE_CHARACTERS = 1 << 15
"""A large text file is cut at line ends into documents of at most this much."""
# `encodings` is a hundred tables from one template: they would stand on both sides of a split.
_LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings"})


def parse_corpus(text: str) -> Corpus:
    """The corpus of text that an address names: `body` or `body?option=value&…`.

    `python-source`, `python-packages-2026`, the path of a file or a folder, or `hf:NAME`. Raises
    `InputError` for anything else, with the nearest name, and for options that the kind does not
    know.
    """
    address = Address.parse(text)
    if address.body in (PYTHON_SOURCE, FROZEN):
        address.take()
        return PythonSource() if address.body == PYTHON_SOURCE else FrozenPackages()
    if address.body.startswith(PREFIX):
        field = address.options.get("field", "text")
        return HubCorpus(address, partial(_text_row, field), options=("field",))
    if expanded(address.body).exists():
        return PathCorpus(address.body, address.take("field")["field"])
    names = (PYTHON_SOURCE, FROZEN)
    near = difflib.get_close_matches(address.body, names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise InputError(
        f"corpus {address.body!r} does not exist: {hint}expected {', '.join(names)}, the path of a "
        "file or folder, or hf:NAME"
    )


def _text_row(field: str, name: str, row: Mapping[str, Any], where: str) -> Document:
    return Document(name, text_of(row, field, where))


@dataclass(frozen=True)
class RowFiles(Corpus):
    """Files of rows, a document each, and the split that each file is (None: any)."""

    files: tuple[tuple[Path, SplitName | None], ...]
    read: Reader

    def documents(self, limit: int | None = None) -> Iterator[Document]:
        """Stream the rows, file by file; a name is FILE:NUMBER."""
        return capped(self._rows(), limit)

    def _rows(self) -> Iterator[Document]:
        for path, split in self.files:
            for number, row in read_rows(path):
                document = self.read(f"{path.name}:{number}", row, f"{path}:{number}")
                yield document if split is None else replace(document, split=split)

    def fingerprint(self) -> str:
        """Hash of the files' names, and of what shows that one was written to."""
        return stamp({path.name: path for path, _ in self.files})


class _File(NamedTuple):
    name: str
    path: Path
    size: int


@dataclass(frozen=True)
class PathCorpus(Corpus):
    """The text under a path.

    A single text file is cut at line ends into documents of about 32 kB. In a folder (read
    recursively, in the order of the relative names, hidden files and unknown suffixes left out) a
    text file is one document unless it is larger than 1 MB or packed. Every line of a JSON-lines
    file and every row of a Parquet, CSV or TSV file is a document; `field` (default `text`) is
    where its text stands. Names are relative to the path, so that the split does not depend on
    where the folder lies. Documents of equal text stand in one split, that of the first of them.
    """

    path: str
    field: str | None = None

    def documents(self, limit: int | None = None) -> Iterator[Document]:
        """Stream the documents; a limit takes whole files, evenly from those of a folder."""
        files = self._files()
        chosen = evenly(files, [file.size for file in files], limit)
        texts = chain.from_iterable(map(self._read, chosen))
        return _with_repeats_together(capped(texts, limit))

    def fingerprint(self) -> str:
        """Hash of relative names, of what shows that a file was written to, and of how it is cut.

        A copy of the folder has another, and moving it leaves it as it is.
        """
        files = {file.name: file.path for file in self._files()}
        return stamp(files, self.field, WHOLE_BYTES, PIECE_CHARACTERS)

    def _read(self, file: _File) -> Iterator[Document]:
        """The documents of one file."""
        if suffix_of(file.path) in ROWS:
            field = self.field or "text"
            for number, row in read_rows(file.path, [field]):
                yield _text_row(field, f"{file.name}:{number}", row, f"{file.path}:{number}")
        elif file.size <= WHOLE_BYTES and not is_packed(file.path) and self._root.is_dir():
            yield Document(file.name, read_text(file.path))
        else:
            for index, text in enumerate(text_pieces(file.path, PIECE_CHARACTERS)):
                yield Document(f"{file.name}#{index:05}", text)

    @property
    def _root(self) -> Path:
        return expanded(self.path)

    def _files(self) -> list[_File]:
        root = self._root
        if not root.exists():
            raise InputError(f"corpus {self.path!r} does not exist")
        paths = {root.name: root}
        if root.is_dir():
            known = (path for path in _walk(root) if suffix_of(path) in TEXT | ROWS)
            paths = {path.relative_to(root).as_posix(): path for path in known}
        if not paths:
            suffixes = " ".join(sorted(TEXT | ROWS))
            raise InputError(
                f"corpus {self.path!r} holds no file of a known kind (suffixes: {suffixes})"
            )
        if self.field is not None and not any(suffix_of(path) in ROWS for path in paths.values()):
            raise InputError(f"corpus {self.path!r}: plain text has no fields; leave out ?field=")
        files = []
        for name, path in sorted(paths.items()):
            status = stat_of(path)
            refuse_irregular(path, status.st_mode)  # A pipe is named, not passed over.
            files.append(_File(name, path, status.st_size))
        return files


def _with_repeats_together(documents: Iterable[Document]) -> Iterator[Document]:
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


@dataclass(frozen=True)
class PythonSource(Corpus):
    """Every `*.py` of the standard library without tests, `encodings` and installed packages.

    Sorted by name; of files with the same content only the first is kept. A document is a file,
    its name the path relative to the library. The text depends on the Python version, which is
    part of the fingerprint.
    """

    def documents(self, limit: int | None = None) -> Iterator[Document]:
        """Stream the files; a limit takes evenly from the whole library."""
        files = self._files()
        chosen = evenly(files, [path.stat().st_size for _, path in files], limit)
        return capped(self._read(chosen), limit)

    def fingerprint(self) -> str:
        """Hash of the Python version and of every file's name and content (12 MB: 30 ms)."""
        digest = hashlib.sha256(f"{PYTHON_SOURCE} {platform.python_version()}".encode())
        for name, path in self._files():
            digest.update(f"{name}\0".encode() + hashlib.sha256(_bytes(path)).digest())
        return digest.hexdigest()

    def sources(self) -> dict[str, str]:
        """The Python version."""
        return {"python": platform.python_version()}

    def _files(self) -> list[tuple[str, Path]]:
        root = Path(sysconfig.get_path("stdlib"))
        paths = (path.relative_to(root) for path in root.rglob("*.py"))
        kept = [path for path in paths if not _LEFT_OUT.intersection(path.parts)]
        if not kept:
            raise InputError(
                f"python-source finds no *.py under {root}: this Python ships its library without "
                "source; give a file or a folder of text instead"
            )
        return sorted((path.as_posix(), root / path) for path in kept)

    @staticmethod
    def _read(files: list[tuple[str, Path]]) -> Iterator[Document]:
        seen = set()
        for name, path in files:
            raw = _bytes(path)
            digest = hashlib.sha256(raw).digest()
            if digest in seen:
                continue
            seen.add(digest)
            try:
                yield Document(name, decode_python(raw))
            except (SyntaxError, UnicodeDecodeError) as error:
                raise InputError(
                    f"{path} is not encoded as Python source must be: {error}"
                ) from error


def _bytes(path: Path) -> bytes:
    with open_file(path) as file:
        return file.read()
