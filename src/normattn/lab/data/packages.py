"""The source and documentation of installed distributions: real text without a download."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import Distribution
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, ClassVar, NamedTuple

from normattn.errors import InputError, library, need
from normattn.io import expanded, open_file, read_object
from normattn.lab.data.sources import Corpus, Document, address, capped, evenly, take_options
from normattn.lab.data.text_files import decode_python

RULES = 1
"""Raised whenever the same packages would give other text."""

THRESHOLD = 0.7
PERMUTATIONS = 64
LACKING = (
    "python-packages leaves out near-duplicates with the datasketch library, which is not "
    "installed: pip install 'normattn[data]', or take python-packages-2026, which needs none"
)

SOURCE = frozenset({".py", ".pyx", ".pxd"})
DOCUMENTATION = frozenset({".md", ".rst"})
OWN = "normattn"
"""Left out: the corpus shall not change with the project that is measured on it."""

PACKAGE_BYTES = 5_000_000
"""No package gives more than this, taken evenly from its files: none is most of the text."""

README = "README"
"""The name under which a distribution's long description is a document."""

_TESTS = frozenset({"test", "tests", "idle_test", "testdata", "test_data", "conftest.py"})
_TEST_FILE = re.compile(r"test_.*|.*_tests?\.py")
_VENDORED = frozenset(
    {"_vendor", "vendor", "_vendored", "vendored", "_vendored_packages", "vendored_packages"}
    | {"third_party", "_third_party", "thirdparty", "3rdparty", "extern", "_extern", "externals"}
    | {"node_modules", "site-packages", "typeshed", "stubs"}
)
_MARKED = re.compile(
    r"@generated|do not (?:edit|modify)|don't edit|do not change|auto-?\s?generated"
    r"|automatically (?:generated|created)|generated (?:by|from|automatically|with|using)"
    r"|machine[- ]generated",
    re.IGNORECASE,
)
_HEAD = 1000
_LONGEST_LINE = 1000
_MEAN_LINE = 100
_LETTERS = 0.4
_DIGITS = 0.15


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


@dataclass(frozen=True)
class PackageFile:
    """A file of a distribution; `name` is `package/path`, `digest` what its record says of it.

    `text` stands for the file where there is none: the long description in the metadata.
    """

    package: str
    name: str
    path: Path | None
    size: int
    digest: str
    text: str = ""


@dataclass(frozen=True)
class Package:
    """An installed distribution and the files of it that count, in the order of their names."""

    name: str
    version: str
    files: tuple[PackageFile, ...]


def installed_packages() -> list[Package]:
    """Every distribution that has such files, by name; of two with one name the first found.

    What the record of a distribution lists and the disk does not hold is passed over, and so is a
    distribution that keeps no record of its files.
    """
    packages: dict[str, Package] = {}
    for distribution in importlib.metadata.distributions():
        # A damaged installation may have no name.
        name = _normalised(str(distribution.metadata["Name"] or ""))
        if name and name != OWN and name not in packages:
            packages[name] = Package(name, str(distribution.version), _files(name, distribution))
    return [packages[name] for name in sorted(packages) if packages[name].files]


def read(file: PackageFile) -> str | None:
    """The text of a file; None where it cannot be decoded, or was not written by people."""
    text = file.text if file.path is None else _read(file.path)
    return text if text is not None and text.strip() and not is_generated(text) else None


def is_generated(text: str) -> bool:
    """Whether a text says that a program wrote it, or looks like a table or packed code.

    It says so within its first 1,000 characters; it looks so with a line of more than 1,000
    characters, lines of more than 100 in the mean, or, of what is no space, less than 0.4 letters
    or more than 0.15 digits.
    """
    lines = text.splitlines() or [""]
    filled = sum(not character.isspace() for character in text)
    letters = sum(map(str.isalpha, text))
    digits = sum(map(str.isdigit, text))
    return (
        _MARKED.search(text, 0, _HEAD) is not None
        or max(map(len, lines)) > _LONGEST_LINE
        or len(text) > _MEAN_LINE * len(lines)
        or letters < _LETTERS * filled
        or digits > _DIGITS * filled
    )


def is_wanted(path: PurePath) -> bool:
    """Whether a distribution's file is source or documentation, no test and no vendored copy."""
    suffix, parts = path.suffix.lower(), {part.lower() for part in path.parts}
    if suffix not in SOURCE | DOCUMENTATION or ".." in parts or path.is_absolute():
        return False
    if parts & (_TESTS | _VENDORED) or _TEST_FILE.fullmatch(path.name.lower()):
        return False
    return not any(part.endswith((".dist-info", ".egg-info")) for part in parts) and not (
        suffix in SOURCE and path.stem.endswith(("_pb2", "_pb2_grpc"))
    )


def _files(package: str, distribution: importlib.metadata.Distribution) -> tuple[PackageFile, ...]:
    candidates = sorted(_listed(package, distribution), key=lambda file: file.name)
    return tuple(evenly(candidates, [file.size for file in candidates], PACKAGE_BYTES))


def _listed(package: str, distribution: importlib.metadata.Distribution) -> Iterator[PackageFile]:
    described = distribution.metadata.get_payload()  # type: ignore[attr-defined]
    if isinstance(described, str) and described.strip():
        size = len(described.encode("utf-8", "replace"))
        yield PackageFile(package, f"{package}/{README}", None, size, "", described)
    for file in files_of(distribution, is_wanted):
        try:
            stat = file.path.stat()
        except OSError:
            continue
        digest = file.recorded or f"{stat.st_size} {stat.st_mtime_ns}"
        yield PackageFile(package, f"{package}/{file.name}", file.path, stat.st_size, digest)


def decoded(raw: bytes, suffix: str) -> str | None:
    """The text of a file with such a suffix; None where it is none."""
    try:
        return decode_python(raw) if suffix.lower() in SOURCE else raw.decode("utf-8-sig")
    except (SyntaxError, UnicodeDecodeError):
        return None


def _read(path: Path) -> str | None:
    with open_file(path) as file:
        return decoded(file.read(), path.suffix)


def _normalised(name: str) -> str:
    """A distribution's name as the index knows it: `Foo.Bar_baz` is `foo-bar-baz`."""
    return re.sub(r"[-_.]+", "-", name).lower()


class InstalledFile(NamedTuple):
    """A file by its name in the distribution's record, where it is, and its recorded hash."""

    name: str
    path: Path
    recorded: str | None


def files_of(
    distribution: Distribution, wanted: Callable[[PurePosixPath], bool]
) -> Iterator[InstalledFile]:
    """The wanted files that the record of a distribution lists; none where it keeps no record."""
    for entry in distribution.files or ():
        if wanted(entry):
            recorded = entry.hash.value if entry.hash else None
            yield InstalledFile(entry.as_posix(), Path(str(entry.locate())), recorded)


class NearDuplicates:
    """Remembers the texts it was shown; two are alike above a Jaccard similarity of their lines.

    A line counts once, without the space around it, and an empty one not at all. Similarity is
    estimated from 64 MinHashes: an estimate of 0.7 or more, at a deviation of about 0.06, makes a
    duplicate. The same texts in the same order always give the same answers. Raises `InputError`
    where datasketch is not installed.
    """

    def __init__(self) -> None:
        datasketch = library("datasketch", LACKING)
        self._new_hash: Any = datasketch.MinHash
        self._index = datasketch.MinHashLSH(threshold=THRESHOLD, num_perm=PERMUTATIONS)
        self._shown: list[Any] = []

    def seen(self, text: str) -> bool:
        """Whether a text like this one was shown before; if not, it is remembered."""
        lines = {line.strip() for line in text.splitlines()} - {""}
        own = self._new_hash(num_perm=PERMUTATIONS, hashfunc=zlib.crc32)
        own.update_batch([line.encode("utf-8", "replace") for line in sorted(lines)])
        if any(own.jaccard(self._shown[key]) >= THRESHOLD for key in self._index.query(own)):
            return True
        self._index.insert(len(self._shown), own)
        self._shown.append(own)
        return False
