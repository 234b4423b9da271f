"""A cache of folders that are whole, checked and built once, whoever asks first."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from normattn import atomic
from normattn.errors import InputError

MANIFEST = "manifest.json"
HASHED_BYTES = 256 << 20
"""A folder up to this size is checked byte by byte when it is opened, a larger one by sizes."""


def default_cache_dir() -> Path:
    """$NORMATTN_CACHE, else $XDG_CACHE_HOME/normattn, else ~/.cache/normattn."""
    own = os.environ.get("NORMATTN_CACHE")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "normattn"


def cached_folder(path: Path, build: Callable[[Path], None]) -> Path:
    """`path`, built by `build` unless it is there and whole.

    `build` fills a temporary folder beside, which gets a manifest of sizes and sha256 and is then
    renamed: the folder is whole or absent. Processes that ask at the same time wait on a file lock
    and build once. A damaged folder is named in a warning and built again. Raises `InputError`
    when the place cannot be written or the disk is full.
    """
    if path.exists() and damage(path) is None:
        return path
    with _locked(path):
        if path.exists():
            found = damage(path)
            if found is None:
                return path
            warnings.warn(f"the cache {path} is damaged ({found}); it is built again", stacklevel=2)
        _sweep_leftovers(path)
        atomic.write_directory(path, lambda folder: _fill(folder, build))
    return path


def damage(path: Path) -> str | None:
    """What is wrong with a cached folder, in words; None when it is whole."""
    try:
        files = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        expected = {name: (int(size), str(digest)) for name, (size, digest) in files.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return f"{MANIFEST} cannot be read: {error}"
    hashed = sum(size for size, _ in expected.values()) <= HASHED_BYTES
    for name, (size, digest) in expected.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        found = file.stat().st_size
        if found != size:
            return f"{name} has {found:,} bytes instead of {size:,}"
        if hashed and sha256_of(file) != digest:
            return f"the content of {name} has changed"
    return None


def manifest(path: Path) -> dict[str, str]:
    """The sha256 of every file of a whole folder, by name."""
    files = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    return {name: str(digest) for name, (_, digest) in files.items()}


def sha256_of(path: Path) -> str:
    """The sha256 of a file, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fill(folder: Path, build: Callable[[Path], None]) -> None:
    build(folder)
    files = sorted(path for path in folder.iterdir() if path.is_file())
    found = {path.name: [path.stat().st_size, sha256_of(path)] for path in files}
    atomic.write_json(folder / MANIFEST, found)


def _sweep_leftovers(path: Path) -> None:
    """Remove what a killed build left beside `path`; safe while its lock is held."""
    for leftover in path.parent.glob(f".{path.name}.*"):
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of `path`; it ends with the process, however that dies."""
    lock = path.with_name(f"{path.name}.lock")
    with atomic.explain_os_errors(lock):
        try:
            lock.parent.mkdir(parents=True, exist_ok=True)
        except FileExistsError as error:
            raise InputError(f"the cache folder {lock.parent} is a file") from error
        file = lock.open("w")
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
