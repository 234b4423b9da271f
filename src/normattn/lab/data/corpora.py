"""Corpora by address: the standard library, pinned packages, a path, a data set of the hub."""

from __future__ import annotations

import difflib
import hashlib
import os
import platform
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from normattn.errors import InputError
from normattn.io import expand_path, file_status, open_file, refuse_irregular
from normattn.lab.data import hub
from normattn.lab.data.frozen_packages import FROZEN, frozen_packages
from normattn.lab.data.sources import (
    Address,
    Corpus,
    Document,
    Part,
    Reader,
    file_corpus,
    without_repeats,
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

__all__ = ["Corpus", "Document", "parse_corpus", "python_source", "rows_of"]

PYTHON_SOURCE = "python-source"
WHOLE_BYTES = 1 << 20
"""A text file in a folder is one document up to this size, and cut like a single file beyond."""
PIECE_CHARACTERS = 1 << 15
"""A large text file is cut at line ends into documents of at most this much."""
# `encodings` is a hundred tables from one template: they would be on both sides of a split.
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
        return python_source() if address.body == PYTHON_SOURCE else frozen_packages()
    if address.body.startswith(hub.PREFIX):
        field = address.take(*hub.OPTIONS, "field")["field"] or "text"
        return hub.hub_corpus(address, partial(_text_row, field))
    if expand_path(address.body).exists():
        return text_files(address.body, address.take("field")["field"])
    names = (PYTHON_SOURCE, FROZEN)
    near = difflib.get_close_matches(address.body, names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise InputError(
        f"corpus {address.body!r} does not exist: {hint}expected {', '.join(names)}, the path of a "
        "file or folder, or hf:NAME"
    )


def _text_row(field: str, name: str, row: Mapping[str, Any], where: str) -> Document:
    return Document(name, text_of(row, field, where))


def rows_of(
    read: Reader, name: str, path: Path, fields: Sequence[str] | None = None
) -> Iterator[Document]:
    """The document in each row of a file, called NAME:NUMBER."""
    for number, row in read_rows(path, fields):
        yield read(f"{name}:{number}", row, f"{path}:{number}")


# Text.


def text_files(place: str, field: str | None) -> Corpus:
    """The text under a path. Documents of equal text are in one split, that of the first.

    A single text file is cut at line ends into documents of about 32 kB. In a folder (read
    recursively, in the order of the relative names, hidden files and unknown suffixes left out) a
    text file is one document unless it is larger than 1 MB or packed. Every line of a JSON-lines
    file and every row of a Parquet, CSV or TSV file is a document; `field` (default `text`) is
    where its text is. Names are relative to the path, so that the split does not depend on
    where the folder lies. Raises `InputError` where there are none.
    """
    root = expand_path(place)
    files = {root.name: root}
    if root.is_dir():
        known = (path for path in _walk(root) if suffix_of(path) in TEXT | ROWS)
        files = {path.relative_to(root).as_posix(): path for path in known}
    if not files:
        suffixes = " ".join(sorted(TEXT | ROWS))
        raise InputError(f"corpus {place!r} holds no file of a known kind (suffixes: {suffixes})")
    if field is not None and not any(suffix_of(path) in ROWS for path in files.values()):
        raise InputError(f"corpus {place!r}: plain text has no fields; leave out ?field=")
    for path in files.values():  # A pipe is named, not passed over.
        refuse_irregular(path, file_status(path).st_mode)
    return file_corpus(
        [Part(name, (path,)) for name, path in sorted(files.items())],
        partial(_texts, field or "text", root.is_dir()),
        rules=(field, WHOLE_BYTES, PIECE_CHARACTERS),
        sift=_with_repeats_together,
    )


def _texts(field: str, in_folder: bool, name: str, path: Path) -> Iterator[Document]:
    """The documents of one file."""
    if suffix_of(path) in ROWS:
        yield from rows_of(partial(_text_row, field), name, path, fields=[field])
    elif in_folder and not is_packed(path) and file_status(path).st_size <= WHOLE_BYTES:
        yield Document(name, read_text(path))
    else:
        for index, text in enumerate(text_pieces(path, PIECE_CHARACTERS)):
            yield Document(f"{name}#{index:05}", text)


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


# The standard library.


def python_source() -> Corpus:
    """Every `*.py` of the standard library without tests, `encodings` and installed packages.

    Sorted by name; of files with the same content only the first is kept. A document is a file,
    its name the path relative to the library. The text depends on the Python version.
    """
    root = Path(sysconfig.get_path("stdlib"))
    names = {path.relative_to(root).as_posix(): path for path in root.rglob("*.py")}
    return file_corpus(
        [
            Part(name, (path,))
            for name, path in sorted(names.items())
            if not _LEFT_OUT.intersection(path.relative_to(root).parts)
        ],
        _python,
        sift=without_repeats,
        versions={"python": platform.python_version()},
    )


def _python(name: str, path: Path) -> Iterator[Document]:
    with open_file(path) as file:
        raw = file.read()
    try:
        yield Document(name, decode_python(raw))
    except (SyntaxError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not encoded as Python source must be: {error}") from error
