"""The files of installed distributions that people wrote: which they are, and how they are read."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath

from normattn.lab.data.corpora.budget import evenly
from normattn.lab.data.corpora.reading import decode_python, open_bytes
from normattn.lab.data.installed import files_of

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
    with open_bytes(path) as file:
        return decoded(file.read(), path.suffix)


def _normalised(name: str) -> str:
    """A distribution's name as the index knows it: `Foo.Bar_baz` is `foo-bar-baz`."""
    return re.sub(r"[-_.]+", "-", name).lower()
