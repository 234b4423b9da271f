"""Real sentence pairs without a download: the translation catalogues of installed packages."""

from __future__ import annotations

import gettext
import hashlib
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar

from normattn.errors import InputError
from normattn.files import open_file
from normattn.lab.data.packages import files_of
from normattn.lab.data.pairs.cleaning import cleaned, is_sentence_pair
from normattn.lab.data.pairs.source import PAIRS, Languages, Pair, PairSource
from normattn.lab.data.sources import take_options

PACKAGES = ("mercurial", "gramps")
"""What is read by default: two packages that need next to nothing else, of different subjects."""


@PAIRS.register
@dataclass(frozen=True)
class Catalogues(PairSource):
    """The messages of installed packages and their translations, from GNU gettext's `.mo` files.

    Read from the package's files, nothing of it is imported. Placeholders, tags and access keys
    are taken out; what is no sentence pair then (fewer than three words, an option list, an
    untranslated message) is left out, and so is a message seen before, letter case aside. The
    messages belong to their packages and stay under their licences.
    """

    languages: Languages
    packages: tuple[str, ...] = PACKAGES

    kind: ClassVar[str] = "catalogues"
    summary: ClassVar[str] = "messages of installed packages [?packages=mercurial,gramps]"

    @classmethod
    def claims(cls, body: str) -> bool:
        """Exactly `catalogues`."""
        return body == cls.kind

    @classmethod
    def parse(cls, body: str, options: Mapping[str, str], languages: Languages) -> Catalogues:
        """`catalogues` or `catalogues?packages=NAME,NAME`."""
        if languages.source != "en":
            raise InputError(
                f"catalogues translate from 'en'; for {languages.source!r} give pairs of your own"
            )
        named = take_options(body, options, ["packages"])["packages"]
        packages = tuple(named.split(",")) if named else PACKAGES
        if not all(packages):
            raise InputError(
                f"corpus 'catalogues': the option 'packages' holds an empty name, got {named!r}; "
                "expected names of installed packages with commas between"
            )
        return cls(languages, packages)

    def pairs(self) -> Iterator[Pair]:
        """Every sentence pair once, package by package."""
        seen: set[str] = set()
        for package in self.packages:
            for file in self._files(package):
                for message, translation in _messages(file):
                    source, target = cleaned(message, translation)
                    if source.casefold() not in seen and is_sentence_pair(source, target):
                        seen.add(source.casefold())
                        yield Pair(source, target)

    def fingerprint(self) -> str:
        """By the content of the catalogues."""
        digest = hashlib.sha256(repr((self.kind, self.packages, self.languages)).encode())
        for package in self.packages:
            for file in self._files(package):
                with open_file(file) as opened:
                    digest.update(hashlib.sha256(opened.read()).digest())
        return digest.hexdigest()

    def _files(self, package: str) -> list[Path]:
        language = self.languages.target
        folder = f"/{language}/LC_MESSAGES/"
        try:
            distribution = metadata.distribution(package)
        except metadata.PackageNotFoundError as error:
            raise InputError(
                f"the corpus 'catalogues' reads the messages of {', '.join(self.packages)}, and "
                f"{package} is not installed: pip install 'normattn[translation]', or give "
                "sentence pairs of your own"
            ) from error
        files = files_of(distribution, lambda f: folder in f"/{f}" and f.suffix == ".mo")
        paths = [file.path for file in sorted(files)]
        if not paths:
            raise InputError(f"{package} has no translations into {language!r}")
        return paths


def _messages(path: Path) -> Iterator[tuple[str, str]]:
    """Messages and translations; of a plural its first form, and nothing of the header."""
    with open_file(path) as file:
        try:
            translations = gettext.GNUTranslations(file)
        except (LookupError, OSError, ValueError, struct.error) as error:
            raise InputError(f"{path} is no catalogue of messages: {error}") from error
    # gettext has no public way to list a catalogue: this is the table that it looks words up in.
    catalogue: Mapping[Any, str] = vars(translations)["_catalog"]
    for key, translation in catalogue.items():
        message, form = key if isinstance(key, tuple) else (key, 0)
        if message and form == 0:
            yield message, translation
