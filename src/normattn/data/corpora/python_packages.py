"""Every installed distribution's source and documentation: real text that needs no download."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from normattn.data.corpora.budget import capped, evenly
from normattn.data.corpora.corpus import CORPORA, Corpus, Document
from normattn.data.corpora.near_duplicates import PERMUTATIONS, THRESHOLD, NearDuplicates
from normattn.data.corpora.package_files import (
    PACKAGE_BYTES,
    Package,
    PackageFile,
    installed_packages,
    read,
)
from normattn.data.sources import take_options
from normattn.errors import InputError

RULES = 1
"""Raised whenever the same packages would give other text."""


@CORPORA.register
@dataclass(frozen=True)
class PythonPackages(Corpus):
    """The source and documentation of every installed distribution, split by distribution.

    A document is a file, called `package/path`, or a distribution's long description,
    `package/README`; its group is the package, so that held-out text comes from packages that were
    never trained on. Left out are tests, generated files, vendored copies, this project itself,
    what cannot be decoded, and what is nearly the same as a file before it (by package and path).
    No package gives more than 5 MB. Documents come in the order of a hash of their names, so that
    any part of the corpus is a mixture of all packages.
    """

    kind: ClassVar[str] = "python-packages"
    summary: ClassVar[str] = "source and documentation of the installed packages, split by package"

    @classmethod
    def claims(cls, body: str) -> bool:
        """Exactly `python-packages`."""
        return body == cls.kind

    @classmethod
    def parse(cls, body: str, options: Mapping[str, str]) -> PythonPackages:
        """`python-packages`; there are no options."""
        take_options(body, options, [])
        return cls()

    def documents(self, limit: int | None = None) -> Iterator[Document]:
        """Stream the files; a limit takes evenly from all packages."""
        files = {file.name: file for file in _candidates(limit)}
        names = _selected(self.fingerprint(), limit)
        return capped(_opened([files[name] for name in names]), limit)

    def fingerprint(self) -> str:
        """Hash of the rules, the packages' names and versions, and their records of their files."""
        limits = (PACKAGE_BYTES, THRESHOLD, PERMUTATIONS)
        rules = (self.kind, RULES, platform.python_version(), limits)
        digest = hashlib.sha256(repr(rules).encode())
        for package in _packages():
            digest.update(repr((package.name, package.version)).encode())
            for file in package.files:
                digest.update(repr((file.name, file.size, file.digest, file.text)).encode())
        return digest.hexdigest()

    def total_bytes(self) -> int | None:
        """The size of the files before near-duplicates and generated ones are left out."""
        return sum(file.size for file in _candidates(None))

    def sources(self) -> dict[str, str]:
        """The version of every package."""
        return {package.name: package.version for package in _packages()}

    def __str__(self) -> str:
        return self.kind


def _packages() -> list[Package]:
    packages = installed_packages()
    if not packages:
        raise InputError(
            "python-packages finds no installed package with source: install some beside this "
            "one, or give a file or a folder of text instead"
        )
    return packages


def _candidates(limit: int | None) -> list[PackageFile]:
    files = [file for package in _packages() for file in package.files]
    return evenly(files, [file.size for file in files], limit)


@lru_cache(maxsize=4)
def _selected(fingerprint: str, limit: int | None) -> tuple[str, ...]:
    """The names of the files that are kept, in the order in which they are streamed.

    A corpus is read more than once (its tokeniser is trained first): `fingerprint` is the memory's
    key.
    """
    shown = NearDuplicates()
    names = []
    for file in _candidates(limit):
        text = read(file)
        if text is not None and not shown.seen(text):
            names.append(file.name)
    return tuple(sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest()))


def _opened(files: list[PackageFile]) -> Iterator[Document]:
    for file in files:
        text = read(file)
        if text is not None:
            yield Document(file.name, text, group=file.package)
