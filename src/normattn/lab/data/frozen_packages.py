"""A frozen corpus: pinned packages of the package index, the same text on every machine."""

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
from itertools import chain
from pathlib import Path, PurePath, PurePosixPath
from typing import Any

from normattn.errors import InputError
from normattn.io import open_file, sha256_of
from normattn.lab.data.sources import Corpus, Document, limit_bytes, sample_evenly
from normattn.lab.data.store import cached_folder
from normattn.lab.data.text_files import decode_python, read_text

FROZEN = "python-packages-2026"
PACKAGE_BYTES = 1_000_000
"""The most bytes of text from one package, taken evenly from its files."""
LIST = Path(__file__).with_name("python_packages_2026.txt")
_TEXT = "documents.jsonl"


def frozen_packages(requirements: Path = LIST) -> Corpus:
    """Return the source and documentation of pinned packages, split by package.

    `requirements` pins them with hashes, as pip reads it. pip downloads the wheels once into the
    cache; they are neither installed nor imported. Tests, vendored copies, generated files and the
    listed near-duplicates are excluded. Documents are ordered by a hash of their names, so that
    every range is a mixture of all packages. Raises `InputError` if the text has another hash.
    """
    facts = read_facts(requirements)
    pinned = re.findall(r"^(\S+)==(\S+) --hash=sha256:", read_text(requirements), re.MULTILINE)
    note = (
        f"the corpus {FROZEN} is {len(pinned)} pinned packages, which pip fetches once from its "
        f"index ({int(facts.get('download-bytes', 0)) / 1e6:.0f} MB) into the cache"
    )

    def rows() -> Iterator[Document]:
        with open_file(package_text(requirements)) as file:
            for line in file:
                name, group, text = json.loads(line)
                yield Document(name, text, group)

    return Corpus(
        lambda limit=None: limit_bytes(rows(), limit),
        # The list contains the digest of the text, so this downloads nothing.
        lambda: hashlib.sha256(f"{FROZEN} {facts['text-sha256']}".encode()).hexdigest(),
        sources=lambda: dict(pinned),
        notes=lambda: (note,),
    )


def read_facts(requirements: Path) -> dict[str, str]:
    """Return the facts in comments of the list: text-sha256, text-bytes, download-bytes."""
    return dict(re.findall(r"^# ([a-z0-9-]+) (\S+)$", read_text(requirements), re.MULTILINE))


def package_text(requirements: Path) -> Path:
    """Return the cached file of all documents, one JSON array a line, checked against the list."""
    expected = read_facts(requirements)["text-sha256"]

    def build(folder: Path) -> None:
        with tempfile.TemporaryDirectory() as wheels:
            download(requirements, Path(wheels))
            listed = re.findall(r"^# near-duplicate (\S+)$", read_text(requirements), re.MULTILINE)
            write_documents(Path(wheels), frozenset(listed), folder / _TEXT)
        digest = sha256_of(folder / _TEXT)
        if digest != expected:
            raise InputError(
                f"the text of the pinned packages has the sha256 {digest} here instead of "
                f"{expected}: a different corpus is not used"
            )

    return cached_folder("packages", expected, build) / _TEXT


def download(requirements: Path, folder: Path) -> None:
    """Download the pinned wheels into `folder` with pip, which checks their hashes.

    Only pure wheels: the same files for every platform. Raises `InputError` with pip's message.
    """
    if importlib.util.find_spec("pip") is None:
        raise InputError("pip is not installed in this environment (python -m ensurepip)")
    pip = (sys.executable, "-m", "pip", "download", "-q", "--no-input", "--no-deps")
    pure = ("--only-binary=:all:", "--platform=any", "--implementation=py", "--abi=none")
    process = subprocess.run(
        (*pip, *pure, "--python-version=3.13", "--dest", str(folder), "-r", str(requirements)),
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    if process.returncode:
        errors = [line for line in process.stderr.splitlines() if line.startswith("ERROR: ")]
        problem = errors[-1].removeprefix("ERROR: ") if errors else f"status {process.returncode}"
        raise InputError(
            f"pip could not fetch the packages pinned in {requirements.name}: {problem}; rerun the "
            "command where pip can reach its index; it continues from its cache"
        )


def write_documents(wheels: Path, near_duplicates: Collection[str], out: Path) -> int:
    """Write the documents of the wheels in a folder as JSON lines; return the bytes of text."""
    found = chain.from_iterable(package_texts(wheel) for wheel in wheels.glob("*.whl"))
    texts = {name: text for name, text in found if name not in near_duplicates}
    with out.open("w", encoding="utf-8", newline="\n") as file:
        for name in sorted(texts, key=lambda name: hashlib.sha256(name.encode()).digest()):
            row = [name, name.partition("/")[0], texts[name]]
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    return sum(len(text.encode()) for text in texts.values())


def package_of(wheel: Path) -> str:
    """Return the normalised package name of a wheel."""
    return re.sub(r"[-_.]+", "-", wheel.name.partition("-")[0]).lower()


_SOURCE, _DOCUMENTATION = frozenset({".py", ".pyx", ".pxd"}), frozenset({".md", ".rst"})
_TESTS = frozenset({"test", "tests", "idle_test", "testdata", "test_data", "conftest.py"})
_TEST_FILE = re.compile(r"test_.*|.*_tests?\.py")
_VENDORED = frozenset(
    {"_vendor", "vendor", "_vendored", "vendored", "_vendored_packages", "vendored_packages"}
    | {"third_party", "_third_party", "thirdparty", "3rdparty", "extern", "_extern", "externals"}
    | {"node_modules", "site-packages", "typeshed", "stubs"}
)
_GENERATED_MARK = re.compile(
    r"@generated|do not (?:edit|modify)|don't edit|do not change|auto-?\s?generated"
    r"|automatically (?:generated|created)|generated (?:by|from|automatically|with|using)"
    r"|machine[- ]generated",
    re.IGNORECASE,
)


def package_texts(wheel: Path) -> list[tuple[str, str]]:
    """Return the hand-written texts of a wheel, at most `PACKAGE_BYTES`: (`package/path`, text)."""
    texts = []
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            path = PurePosixPath(name)
            text: Any = None
            if path.match("*.dist-info/METADATA") and len(path.parts) == 2:
                metadata = archive.read(name).decode("utf-8", "replace")
                name, text = "README", email.message_from_string(metadata).get_payload()
            elif is_written_file(path):
                raw, is_source = archive.read(name), path.suffix.lower() in _SOURCE
                with suppress(SyntaxError, UnicodeDecodeError):
                    text = decode_python(raw) if is_source else raw.decode("utf-8-sig")
            if isinstance(text, str) and text.strip() and not is_generated(text):
                texts.append((f"{package_of(wheel)}/{name}", text))
    texts.sort()
    return sample_evenly(texts, [len(text.encode()) for _, text in texts], PACKAGE_BYTES)


def is_written_file(path: PurePath) -> bool:
    """Return whether a file is source or documentation, and no test or vendored copy."""
    suffix, parts = path.suffix.lower(), {part.lower() for part in path.parts}
    return suffix in _SOURCE | _DOCUMENTATION and not (
        path.is_absolute()
        or parts & (_TESTS | _VENDORED | {".."})
        or _TEST_FILE.fullmatch(path.name.lower())
        or any(part.endswith((".dist-info", ".egg-info")) for part in parts)
        or (suffix in _SOURCE and path.stem.endswith(("_pb2", "_pb2_grpc")))
    )


def is_generated(text: str) -> bool:
    """Return whether a text is marked as generated, or looks like a table or minified code.

    A mark must be in the first 1,000 characters. Signs are a line of more than 1,000 characters,
    a mean line of more than 100, less than 40 % letters or more than 15 % digits (without spaces).
    """
    lines = text.splitlines() or [""]
    visible = sum(not character.isspace() for character in text)
    letters = sum(map(str.isalpha, text))
    digits = sum(map(str.isdigit, text))
    return (
        _GENERATED_MARK.search(text, 0, 1000) is not None
        or max(map(len, lines)) > 1000
        or len(text) > 100 * len(lines)
        or letters < 0.4 * visible
        or digits > 0.15 * visible
    )
