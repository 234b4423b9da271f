"""Corpora of text: the standard library, pinned packages, a path, a data set of the hub."""

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
from normattn.io import expand_path, file_status, open_file
from normattn.lab.data import hub
from normattn.lab.data.frozen_packages import FROZEN, frozen_packages
from normattn.lab.data.sources import (
    Address,
    Corpus,
    Document,
    FileGroup,
    RowReader,
    drop_repeats,
    file_corpus,
)
from normattn.lab.data.text_files import (
    ROWS,
    TEXT,
    decode_python,
    is_gzipped,
    read_rows,
    read_text,
    suffix_of,
    text_of,
    text_pieces,
)

PYTHON_SOURCE = "python-source"
WHOLE_BYTES = 1 << 20
"""A text file in a folder is one document up to this size; larger ones are cut."""
PIECE_CHARACTERS = 1 << 15
"""A large text file is cut at line ends into documents of at most this length."""
# `encodings` is a hundred tables from one template, which would be in several splits.
_EXCLUDED = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings"})


def parse_corpus(text: str) -> Corpus:
    """Return the corpus at an address, `body` or `body?option=value&…`.

    The body is `python-source`, `python-packages-2026`, the path of a file or folder, or `hf:NAME`.
    Raises `InputError` for anything else, with the nearest name, and for unknown options.
    """
    address = Address.parse(text)
    if address.body in (PYTHON_SOURCE, FROZEN):
        address.get_options()
        return python_source() if address.body == PYTHON_SOURCE else frozen_packages()
    if address.body.startswith(hub.PREFIX):
        field = address.get_options(*hub.OPTIONS, "field")["field"] or "text"
        return hub.hub_corpus(address, partial(_read_row, field))
    if expand_path(address.body).exists():
        return text_files(address.body, address.get_options("field")["field"])
    names = (PYTHON_SOURCE, FROZEN)
    near = difflib.get_close_matches(address.body, names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise InputError(
        f"corpus {address.body!r} does not exist: {hint}expected {', '.join(names)}, the path of a "
        "file or folder, or hf:NAME"
    )


def _read_row(field: str, name: str, row: Mapping[str, Any], where: str) -> Document:
    return Document(name, text_of(row, field, where))


def rows_of(
    read: RowReader, name: str, path: Path, fields: Sequence[str] | None = None
) -> Iterator[Document]:
    """Yield the document in each row of a file, named NAME:NUMBER."""
    for number, row in read_rows(path, fields):
        yield read(f"{name}:{number}", row, f"{path}:{number}")


# Text.


def text_files(path: str, field: str | None) -> Corpus:
    """Return the text of a file or folder. Documents of equal text are in one split.

    A folder is read recursively in the order of relative names, without hidden files and unknown
    suffixes. In a folder a text file is one document, unless it is larger than 1 MB or gzipped.
    Such files and a single text file are cut at line ends into documents of about 32 kB. Every row
    of a JSON-lines, Parquet, CSV or TSV file, and of a single JSON array, is a document with its
    text in `field` (default `text`). Names are relative, so that splits do not change when the
    folder moves. Raises `InputError` if there is no file.
    """
    root = expand_path(path)
    files = {root.name: root}
    if root.is_dir():
        known = (file for file in _walk(root) if suffix_of(file) in TEXT | ROWS)
        files = {file.relative_to(root).as_posix(): file for file in known}
    if not files:
        suffixes = " ".join(sorted(TEXT | ROWS))
        raise InputError(f"corpus {path!r} holds no file of a known kind (suffixes: {suffixes})")
    if field is not None and not any(_has_rows(file, root.is_dir()) for file in files.values()):
        raise InputError(f"corpus {path!r}: plain text has no fields; leave out ?field=")
    return file_corpus(
        [FileGroup(name, (file,)) for name, file in sorted(files.items())],
        partial(_read_file, field or "text", root.is_dir()),
        rules=(field, WHOLE_BYTES, PIECE_CHARACTERS),
        select=_group_repeats,
    )


def _has_rows(path: Path, in_folder: bool) -> bool:
    """Whether a file holds rows. In a folder a .json file may hold anything, and is not read."""
    return suffix_of(path) in ROWS or (suffix_of(path) == ".json" and not in_folder)


def _read_file(field: str, in_folder: bool, name: str, path: Path) -> Iterator[Document]:
    if _has_rows(path, in_folder):
        yield from rows_of(partial(_read_row, field), name, path, fields=[field])
    elif in_folder and not is_gzipped(path) and file_status(path).st_size <= WHOLE_BYTES:
        yield Document(name, read_text(path))
    else:
        for index, text in enumerate(text_pieces(path, PIECE_CHARACTERS)):
            yield Document(f"{name}#{index:05}", text)


def _group_repeats(documents: Iterable[Document]) -> Iterator[Document]:
    """Put documents that repeat a text into the group of its first occurrence.

    Otherwise a training text could be in the test split. Keeps a hash and a name of each document.
    """
    first_keys: dict[bytes, str] = {}
    for document in documents:
        digest = hashlib.blake2b(document.text.encode("utf-8", "replace"), digest_size=12).digest()
        key = first_keys.setdefault(digest, document.split_key)
        yield document if key == document.split_key else replace(document, group=key)


def _walk(root: Path) -> Iterator[Path]:
    """Yield every file that is not hidden; `InputError` for a folder that cannot be listed."""

    def refuse(error: OSError) -> None:
        raise InputError(f"{error.filename} cannot be read: {error.strerror}") from error

    for folder, folders, names in os.walk(root, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(folder, name) for name in names if not name.startswith("."))


# The standard library.


def python_source() -> Corpus:
    """Return every `*.py` of the standard library without tests and `encodings`.

    A document is a file, named by its path in the library and sorted by name; repeated files are
    dropped. The text depends on the Python version.
    """
    root = Path(sysconfig.get_path("stdlib"))
    names = {path.relative_to(root).as_posix(): path for path in root.rglob("*.py")}
    return file_corpus(
        [
            FileGroup(name, (path,))
            for name, path in sorted(names.items())
            if not _EXCLUDED.intersection(path.relative_to(root).parts)
        ],
        _read_python,
        select=drop_repeats,
        versions={"python": platform.python_version()},
    )


def _read_python(name: str, path: Path) -> Iterator[Document]:
    with open_file(path) as file:
        raw = file.read()
    try:
        yield Document(name, decode_python(raw))
    except (SyntaxError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not encoded as Python source must be: {error}") from error
