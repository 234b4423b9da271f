"""Files that are whole or absent: written beside their place, flushed to the disk, then renamed."""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from normattn.errors import InputError


@contextmanager
def explain_os_errors(path: Path) -> Iterator[None]:
    """Turn a full disk, a read-only or a forbidden place into one `InputError` naming `path`."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            message = f"no space left on the disk that holds {path}; nothing half-written was kept"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            message = f"{path} cannot be written: {error.strerror}; choose a writable place"
        elif error.errno in (errno.ENOTDIR, errno.EISDIR, errno.EEXIST):
            message = f"{path} cannot be written: {error.strerror}"
        else:
            raise
        raise InputError(message) from error


def write_with(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary file beside `path`, then rename it into place.

    Raises `InputError` when the disk is full or the place cannot be written; the old file, if
    any, is then untouched.
    """
    with explain_os_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        os.close(handle)
        temporary = Path(name)
        try:
            write(temporary)
            _flush(temporary)
            # mkstemp makes files private; a result is as readable as any other new file.
            temporary.chmod(0o666 & ~_umask())
            temporary.replace(path)
            _flush(path.parent)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def write_bytes(path: Path, content: bytes) -> None:
    """Write `content` to `path`, whole or not at all."""
    write_with(path, lambda temporary: _write_all(temporary, content))


def write_text(path: Path, content: str) -> None:
    """Write `content` as UTF-8 to `path`, whole or not at all."""
    write_bytes(path, content.encode())


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON to `path`; NaN and infinities are refused by `json`."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_directory(path: Path, fill: Callable[[Path], None]) -> None:
    """Let `fill` populate a temporary folder beside `path`, then rename it into place.

    `path` must not hold a folder yet, unless it is replaced as a whole.
    """
    with explain_os_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
        try:
            fill(temporary)
            for file in sorted(temporary.rglob("*")):
                _flush(file)
            temporary.chmod(0o777 & ~_umask())
            _swap_in(temporary, path)
            _flush(path.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _swap_in(temporary: Path, path: Path) -> None:
    """Rename `temporary` to `path`; a folder that stands there is moved away first."""
    if not path.exists():
        temporary.replace(path)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{path.name}.old.", dir=path.parent))
    try:
        path.replace(old / "old")
        temporary.replace(path)
    finally:
        shutil.rmtree(old, ignore_errors=True)


def _write_all(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    """The process's file-creation mask; it can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
