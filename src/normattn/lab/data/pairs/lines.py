"""Two files whose lines are each other's translations."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from itertools import zip_longest
from pathlib import Path

from normattn.errors import InputError
from normattn.files import identity, stat_of
from normattn.lab.data.text_files import not_utf8, open_bytes


def aligned_lines(source: Path, target: Path) -> Iterator[tuple[str, str]]:
    """Line n of one file with line n of the other (plain or `.gz`), without their line ends.

    Raises `InputError` where the files have unequal numbers of lines, naming both numbers, where
    one cannot be read, and where a line is not UTF-8.
    """
    here = there = 0
    for a, b in zip_longest(_lines(source), _lines(target)):
        here += a is not None
        there += b is not None
        if a is not None and b is not None:
            yield a, b
    if here != there:
        raise InputError(
            f"{source} has {here:,} lines and {target} has {there:,}: line n of one must be the "
            "translation of line n of the other"
        )


def stamp(paths: Iterable[Path]) -> str:
    """Hash of the files' names, and of what tells whether they were written to."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(repr((path.name, *identity(stat_of(path)))).encode())
    return digest.hexdigest()


def _lines(path: Path) -> Iterator[str]:
    offset = 0
    with open_bytes(path) as file:
        for number, raw in enumerate(file):
            try:
                line = raw.decode()
            except UnicodeDecodeError as error:
                raise not_utf8(path, offset + error.start, error) from error
            offset += len(raw)
            yield (line.removeprefix("\ufeff") if number == 0 else line).rstrip("\r\n")
