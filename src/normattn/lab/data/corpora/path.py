"""A file or a folder of files: text, JSON lines or Parquet, each by its suffix."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import ClassVar

from normattn.errors import InputError
from normattn.files import expanded, identity, refuse_irregular, stat_of
from normattn.lab.data.corpora.budget import capped, shares
from normattn.lab.data.corpora.corpus import CORPORA, Corpus, Document
from normattn.lab.data.corpora.formats import DEFAULT_FIELD, FileFormat, format_of, formats
from normattn.lab.data.corpora.reading import is_packed
from normattn.lab.data.corpora.text_file import PIECE_CHARACTERS, TEXT
from normattn.lab.data.sources import address, take_options

WHOLE_BYTES = 1 << 20
"""A text file in a folder is one document up to this size, and cut like a single file beyond."""


@dataclass(frozen=True)
class _File:
    name: str
    path: Path
    format: FileFormat
    size: int


@CORPORA.register
@dataclass(frozen=True)
class PathCorpus(Corpus):
    """The text under a path.

    A single text file is cut at line ends into documents of about 32 kB. In a folder (read
    recursively, in the order of the relative names, hidden files and unknown suffixes left out) a
    text file is one document unless it is larger than 1 MB or packed. Every line of a JSON-lines
    file and every row of a Parquet file is a document; `field` says where its text is. Names are
    relative to the path, so that the split does not depend on where the folder lies. Documents of
    equal text stand in one split, that of the first of them.
    """

    path: str
    field: str | None = None

    kind: ClassVar[str] = "path"
    summary: ClassVar[str] = "a file or a folder: text, .jsonl or .parquet, also .gz [?field=text]"

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
        if any(file.format is not TEXT or is_packed(file.path) for file in files):
            return None
        return sum(file.size for file in files)

    def __str__(self) -> str:
        return address(self.path, field=self.field)

    def _read(self, file: _File) -> Iterator[Document]:
        whole = file.format.whole
        packed = is_packed(file.path)  # its size says nothing about the text's
        small = file.size <= WHOLE_BYTES and not packed
        if whole is not None and small and self._root.is_dir():
            return iter([Document(file.name, whole(file.path))])
        return file.format.read(file.path, file.name, self.field or DEFAULT_FIELD)

    @property
    def _root(self) -> Path:
        return expanded(self.path)

    def _files(self) -> list[_File]:
        root = self._root
        if not root.exists():
            raise InputError(f"corpus {self.path!r} does not exist")
        if root.is_dir():
            files = self._folder(root)
        else:
            files = [_File(root.name, root, format_of(root) or TEXT, _size(root))]
        if self.field is not None and not any(file.format.has_field for file in files):
            raise InputError(f"corpus {str(self)!r}: plain text has no fields; leave out ?field=")
        return files

    def _folder(self, root: Path) -> list[_File]:
        files = []
        for path in _walk(root):
            file_format = format_of(path)
            if file_format is not None:
                size = _size(path)
                files.append(_File(path.relative_to(root).as_posix(), path, file_format, size))
        if not files:
            known = " ".join(sorted(formats()))
            raise InputError(
                f"corpus {self.path!r} holds no file of a known kind (suffixes: {known})"
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
