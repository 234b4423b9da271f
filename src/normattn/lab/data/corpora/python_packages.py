"""Every installed distribution's source and documentation: real text that needs no download."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from normattn.errors import InputError, need
from normattn.files import expanded
from normattn.lab.data.corpora.budget import capped, evenly
from normattn.lab.data.corpora.corpus import CORPORA, Corpus, Document
from normattn.lab.data.corpora.near_duplicates import (
    LACKING,
    PERMUTATIONS,
    THRESHOLD,
    NearDuplicates,
)
from normattn.lab.data.corpora.package_files import (
    PACKAGE_BYTES,
    Package,
    PackageFile,
    installed_packages,
    read,
)
from normattn.lab.data.sources import address, take_options
from normattn.structured import read_object

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

    `versions`: the `corpus.json` of a run or of a published folder. The corpus is then of the
    packages that this names, in those versions, whatever else is installed: the same text again.
    """

    kind: ClassVar[str] = "python-packages"
    summary: ClassVar[str] = "source and documentation of the installed packages, split by package"
    versions: str | None = None

    @classmethod
    def claims(cls, body: str) -> bool:
        """Exactly `python-packages`."""
        return body == cls.kind

    @classmethod
    def parse(cls, body: str, options: Mapping[str, str]) -> PythonPackages:
        """`python-packages`, or `python-packages?versions=corpus.json`."""
        return cls(**take_options(body, options, ["versions"]))

    def documents(self, limit: int | None = None) -> Iterator[Document]:
        """Stream the files; a limit takes evenly from all packages."""
        candidates = self._candidates(limit)
        names = _selected(tuple(candidates))
        files = {file.name: file for file in candidates}
        return capped(_opened([files[name] for name in names]), limit)

    def fingerprint(self) -> str:
        """Hash of the rules, the packages' names and versions, and their records of their files."""
        limits = (PACKAGE_BYTES, THRESHOLD, PERMUTATIONS)
        rules = (self.kind, RULES, platform.python_version(), limits)
        digest = hashlib.sha256(repr(rules).encode())
        for package in self._packages():
            digest.update(repr((package.name, package.version)).encode())
            for file in package.files:
                digest.update(repr((file.name, file.size, file.digest, file.text)).encode())
        return digest.hexdigest()

    def total_bytes(self) -> int | None:
        """The size of the files before near-duplicates and generated ones are left out."""
        return sum(file.size for file in self._candidates(None))

    def sources(self) -> dict[str, str]:
        """The version of every package."""
        return {package.name: package.version for package in self._packages()}

    def notes(self) -> tuple[str, ...]:
        """The text hangs on what is installed; `InputError` where datasketch is not."""
        need("datasketch", LACKING)
        if self.versions is not None:
            return ()
        return (
            f"the corpus {self.kind} is what is installed in this environment: another one gives "
            "other text, and python-packages-2026 the same everywhere",
        )

    def __str__(self) -> str:
        return address(self.kind, versions=self.versions)

    def _packages(self) -> list[Package]:
        packages = installed_packages()
        if self.versions is not None:
            return _of_versions(packages, self.versions)
        if not packages:
            raise InputError(
                "python-packages finds no installed package with source: install some beside this "
                "one, or give a file or a folder of text instead"
            )
        return packages

    def _candidates(self, limit: int | None) -> list[PackageFile]:
        files = [file for package in self._packages() for file in package.files]
        return evenly(files, [file.size for file in files], limit)


def _of_versions(packages: list[Package], record: str) -> list[Package]:
    """The packages that `record` names, in its versions; `InputError` where one is not there."""
    wanted = read_object(expanded(record)).get("sources")
    if not isinstance(wanted, dict) or not wanted:
        raise InputError(
            f"{record} names no packages: expected the corpus.json of a run on python-packages"
        )
    installed = {package.name: package for package in packages}
    lacks = [
        f"{name}=={version}"
        for name, version in wanted.items()
        if name not in installed or installed[name].version != version
    ]
    if lacks:
        more = f" and {len(lacks) - 3} more" if len(lacks) > 3 else ""
        raise InputError(
            f"{len(lacks)} of the {len(wanted)} packages in {record} are not installed in the "
            f"version it names: {', '.join(lacks[:3])}{more} (pip install --no-deps NAME==VERSION)"
        )
    return [installed[name] for name in sorted(wanted)]


@lru_cache(maxsize=4)
def _selected(candidates: tuple[PackageFile, ...]) -> tuple[str, ...]:
    """The names of the files that are kept, in the order in which they are streamed.

    A corpus is read more than once (its tokeniser is trained first), so this is remembered.
    """
    shown = NearDuplicates()
    names = []
    for file in candidates:
        text = read(file)
        if text is not None and not shown.seen(text):
            names.append(file.name)
    return tuple(sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest()))


def _opened(files: list[PackageFile]) -> Iterator[Document]:
    for file in files:
        text = read(file)
        if text is not None:
            yield Document(file.name, text, group=file.package)
