"""A cache of folders that are whole, checked and built once, whoever asks first."""

from __future__ import annotations

import hashlib
import json
import shutil
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from normattn import io
from normattn.errors import InputError
from normattn.io import default_cache_dir, identity, read_object, sha256_of
from normattn.locks import locked

MANIFEST = "manifest.json"
HASHED_BYTES = 256 << 20
"""A folder up to this size is read whole whenever it is opened; of a larger one only those files
that were written to since they were last read whole."""


def prepared(
    kind: str,
    decides: object,
    build: Callable[[Path], None],
    cache_dir: Path | None = None,
    resumable: bool = False,
) -> Path:
    """The folder of what `decides` (JSON values) names, built by `build` where it is not there.

    Where it is, `folder_of` says; how it is built, `cached_folder`.
    """
    return cached_folder(folder_of(kind, decides, cache_dir), build, resumable)


def folder_of(kind: str, decides: object, cache_dir: Path | None = None) -> Path:
    """`KIND-DIGEST` in `cache_dir`, by default `default_cache_dir()`."""
    digest = hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:32]
    return (cache_dir or default_cache_dir()) / f"{kind}-{digest}"


def cached_folder(path: Path, build: Callable[[Path], None], resumable: bool = False) -> Path:
    """`path`, built by `build` unless it is there and whole.

    `build` fills a temporary folder beside, which gets a manifest of sizes and sha256 and is then
    renamed: the folder is whole or absent. Processes that ask at the same time wait on a file lock
    and build once. A damaged folder is named in a warning and built again. With `resumable` the
    temporary folder of a build that was killed, or that failed, is given to the next `build`: a
    lost connection or a full disk costs nothing that was done before. Raises `InputError` when the
    place cannot be written or the disk is full.
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
        begun = path.with_name(f".{path.name}.begun") if resumable else None
        _sweep_leftovers(path, begun)
        if begun is None:
            io.write_directory(path, lambda folder: _fill(folder, build), replace=True)
        else:
            _go_on(begun, path, build)
        expected = _manifest(path)
        if _is_large(expected):
            _remember(path, _states(path, expected))
    return path


def _go_on(begun: Path, path: Path, build: Callable[[Path], None]) -> None:
    """Fill `begun`, which an interrupted build may have left, and put it in its place."""
    with io.explain_os_errors(path):
        begun.mkdir(exist_ok=True)
        try:
            _fill(begun, build)
            io.put_in_place(begun, path)
        finally:
            # What a failed build has done is kept for the next one; nothing done leaves nothing.
            with suppress(OSError):
                begun.rmdir()


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
    large = _is_large(expected)
    remembered = _remembered(path) if large else {}
    # As they are before they are read: what is written to meanwhile is read again next time.
    seen = _states(path, expected)
    for name, (size, digest) in expected.items():
        there = (path / name).stat().st_size
        if there != size:
            return f"{name} has {there:,} bytes instead of {size:,}"
        if remembered.get(name) != seen[name] and sha256_of(path / name) != digest:
            return f"the content of {name} has changed"
    if large and seen != remembered:
        _remember(path, seen)
    return None


def _remember(path: Path, seen: Mapping[str, Any]) -> None:
    """Note the states in which all files of a large folder were as they should be."""
    # A cache in a read-only place is read in full every time.
    with suppress(InputError):
        io.write_json(_memory(path), seen)


def _is_large(expected: Mapping[str, tuple[int, str]]) -> bool:
    return sum(size for size, _ in expected.values()) > HASHED_BYTES


def _states(path: Path, expected: Mapping[str, tuple[int, str]]) -> dict[str, Any]:
    """The expected content of every file, and by what it shows that it was not written to since."""
    return {
        name: [digest, *identity((path / name).stat())] for name, (_, digest) in expected.items()
    }


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


def _fill(folder: Path, build: Callable[[Path], None]) -> None:
    build(folder)
    files = sorted(path for path in folder.iterdir() if path.is_file())
    entries = {path.name: [path.stat().st_size, sha256_of(path)] for path in files}
    io.write_json(folder / MANIFEST, entries)


def _sweep_leftovers(path: Path, kept: Path | None) -> None:
    """Remove what killed builds left beside `path`, but for `kept`; its lock must be held."""
    for leftover in path.parent.glob(f".{path.name}.*"):
        if leftover.is_dir() and leftover != kept:
            shutil.rmtree(leftover, ignore_errors=True)
