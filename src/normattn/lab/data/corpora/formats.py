"""File formats, found by suffix: each one is a function that streams a file's documents."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from normattn.lab.data.corpora.corpus import Document

DEFAULT_FIELD = "text"


@dataclass(frozen=True)
class FileFormat:
    """How files of some suffixes are read.

    `read(path, name, field)` yields documents whose names start with `name`; `field` is the
    column or key that holds the text, for the formats that have one. `whole`, where given, reads
    a file as a single document: what a folder does with files that are not too large.
    """

    name: str
    suffixes: frozenset[str]
    has_field: bool
    read: Callable[[Path, str, str], Iterator[Document]]
    whole: Callable[[Path], str] | None = None


_BY_SUFFIX: dict[str, FileFormat] = {}


def register_format(file_format: FileFormat) -> FileFormat:
    """Make a format known; two formats cannot share a suffix."""
    for suffix in file_format.suffixes:
        if suffix in _BY_SUFFIX:
            raise ValueError(f"two file formats claim the suffix {suffix!r}")
        _BY_SUFFIX[suffix] = file_format
    return file_format


def format_of(path: Path) -> FileFormat | None:
    """The format of a file by its suffix (the one before `.gz`); None when it is not known."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] == ".gz":
        suffixes.pop()
    return _BY_SUFFIX.get(suffixes[-1]) if suffixes else None


def formats() -> Mapping[str, FileFormat]:
    """Every known suffix and its format."""
    return dict(_BY_SUFFIX)
