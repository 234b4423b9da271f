"""The running interpreter's own standard library: real text that needs no download."""

from __future__ import annotations

import hashlib
import platform
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from normattn.errors import InputError
from normattn.lab.data.corpora.budget import capped, evenly
from normattn.lab.data.corpora.corpus import CORPORA, Corpus, Document
from normattn.lab.data.corpora.reading import decode_python, open_bytes
from normattn.lab.data.sources import take_options

# `encodings` is a hundred tables from one template: they would stand on both sides of a split.
_LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings"})


@CORPORA.register
@dataclass(frozen=True)
class PythonSource(Corpus):
    """Every `*.py` of the standard library without tests, `encodings` and installed packages.

    Sorted by name; of files with the same content only the first is kept. A document is a file,
    its name the path relative to the library. The text depends on the Python version, which is
    part of the fingerprint.
    """

    kind: ClassVar[str] = "python-source"
    summary: ClassVar[str] = "the running interpreter's standard library, without its tests"

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
        files = _files()
        chosen = evenly(files, [path.stat().st_size for _, path in files], limit)
        return capped(_unique(chosen), limit)

    def fingerprint(self) -> str:
        """Hash of the Python version and every file's name and content (12 MB: 30 ms)."""
        digest = hashlib.sha256(f"{self.kind} {platform.python_version()}".encode())
        for name, path in _files():
            digest.update(f"{name}\0".encode() + hashlib.sha256(_bytes(path)).digest())
        return digest.hexdigest()

    def total_bytes(self) -> int | None:
        """The size of all files."""
        return sum(path.stat().st_size for _, path in _files())

    def sources(self) -> dict[str, str]:
        """The Python version."""
        return {"python": platform.python_version()}

    def __str__(self) -> str:
        return self.kind


def _files() -> list[tuple[str, Path]]:
    root = Path(sysconfig.get_path("stdlib"))
    paths = [path.relative_to(root) for path in root.rglob("*.py")]
    files = sorted((path.as_posix(), root / path) for path in paths if _wanted(path))
    if not files:
        raise InputError(
            f"python-source finds no *.py under {root}: this Python ships its library without "
            "source; give a file or a folder of text instead"
        )
    return files


def _wanted(path: Path) -> bool:
    return not _LEFT_OUT.intersection(path.parts)


def _unique(files: list[tuple[str, Path]]) -> Iterator[Document]:
    seen = set()
    for name, path in files:
        raw = _bytes(path)
        digest = hashlib.sha256(raw).digest()
        if digest not in seen:
            seen.add(digest)
            yield Document(name, _decoded(raw, path))


def _bytes(path: Path) -> bytes:
    with open_bytes(path) as file:
        return file.read()


def _decoded(raw: bytes, path: Path) -> str:
    try:
        return decode_python(raw)
    except (SyntaxError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not encoded as Python source must be: {error}") from error
