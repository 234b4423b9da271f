"""A cache of folders that are whole, checked and built once, whoever asks first."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from normattn import atomic
from normattn.errors import InputError
from normattn.files import default_cache_dir
from normattn.locks import locked
from normattn.structured import read_object

MANIFEST = "manifest.json"
HASHED_BYTES = 256 << 20
"""A folder up to this size is read whole whenever it is opened; of a larger one only those files
that were written to since they were last read whole."""


def prepared(
    kind: str, decides: object, build: Callable[[Path], None], cache_dir: Path | None = None
) -> Path:
    """The folder of what `decides` (JSON values) names, built by `build` where it is not there.

    It is called `WHAT-DIGEST` in `cache_dir`, by default `default_cache_dir()`.
    """
    digest = hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:32]
    return cached_folder((cache_dir or default_cache_dir()) / f"{kind}-{digest}", build)


def cached_folder(path: Path, build: Callable[[Path], None]) -> Path:
    """`path`, built by `build` unless it is there and whole.

    `build` fills a temporary folder beside, which gets a manifest of sizes and sha256 and is then
    renamed: the folder is whole or absent. Processes that ask at the same time wait on a file lock
    and build once. A damaged folder is named in a warning and built again. Raises `InputError`
    when the place cannot be written or the disk is full.
    """
    if path.exists() and damage(path) is None:
        return path
    with locked(path.with_name(f"{path.name}.lock")):
        if path.exists():
            problem = damage(path)
            if problem is None:
                return path
            warnings.warn(
                f"the cache {path} is damaged ({problem}); it is built again", stacklevel=2
            )
        _sweep_leftovers(path)
        atomic.replace_directory(path, lambda folder: _fill(folder, build))
    return path


def damage(path: Path) -> str | None:
    """What is wrong with a cached folder, in words; None when it is whole."""
    try:
        expected = _manifest(path)
        there = {file.name for file in path.iterdir()} - {MANIFEST}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return f"{MANIFEST} cannot be read: {error}"
    for name in sorted(set(expected) | there):
        if name not in there:
            return f"{name} is missing"
        if name not in expected:
            return f"{MANIFEST} does not know {name}"
    if not expected:
        return f"{MANIFEST} is empty"
    try:
        return _difference(path, expected)
    except OSError as error:
        return f"a file cannot be read: {error}"


def _difference(path: Path, expected: Mapping[str, tuple[int, str]]) -> str | None:
    """The first file whose size or content is not the expected one, in words."""
    large = sum(size for size, _ in expected.values()) > HASHED_BYTES
    remembered = _remembered(path) if large else {}
    seen = {}
    for name, (size, digest) in expected.items():
        status = (path / name).stat()
        if status.st_size != size:
            return f"{name} has {status.st_size:,} bytes instead of {size:,}"
        seen[name] = [digest, *_identity(status)]
        if remembered.get(name) != seen[name] and sha256_of(path / name) != digest:
            return f"the content of {name} has changed"
    if large and seen != remembered:
        # A cache in a read-only place is read whole every time.
        with suppress(InputError):
            atomic.write_json(_memory(path), seen)
    return None


def _identity(status: os.stat_result) -> tuple[int, int, int]:
    """What differs once a file has been written to: the system sets ctime, and nobody else can."""
    return status.st_ino, status.st_mtime_ns, status.st_ctime_ns


def _memory(path: Path) -> Path:
    """Where it stands which files of a large folder had which content when last read whole."""
    return path.with_name(f"{path.name}.read.json")


def _remembered(path: Path) -> dict[str, Any]:
    try:
        return read_object(_memory(path))
    except InputError:
        return {}


def _manifest(path: Path) -> dict[str, tuple[int, str]]:
    """The size and sha256 of every file, by name."""
    files = read_object(path / MANIFEST)
    return {name: (int(size), str(digest)) for name, (size, digest) in files.items()}


def manifest(path: Path) -> dict[str, str]:
    """The sha256 of every file of a whole folder, by name."""
    return {name: digest for name, (_, digest) in _manifest(path).items()}


def sha256_of(path: Path) -> str:
    """The sha256 of a file, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fill(folder: Path, build: Callable[[Path], None]) -> None:
    build(folder)
    files = sorted(path for path in folder.iterdir() if path.is_file())
    entries = {path.name: [path.stat().st_size, sha256_of(path)] for path in files}
    atomic.write_json(folder / MANIFEST, entries)


def _sweep_leftovers(path: Path) -> None:
    """Remove what a killed build left beside `path`; safe while its lock is held."""
    for leftover in path.parent.glob(f".{path.name}.*"):
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
