"""Files that are whole or absent: written beside their place, flushed to the disk, then renamed."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from normattn.errors import InputError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What the operating system says when there is no room for what is written."""
_RUST_OS_ERROR = re.compile(r"\(os error (\d{1,4})\)")


@contextmanager
def explain_os_errors(path: Path) -> Iterator[None]:
    """Turn what the operating system refuses into one `InputError` naming `path`.

    That is an `OSError` with its number, or what another library makes of one.
    """
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        cause = os_error_in(error)
        if cause is None or cause.errno is None:
            raise
        if cause.errno in FULL:
            message = f"no space left on the disk that holds {path}; make room and run it again"
        elif cause.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            message = f"{path} cannot be written: {cause.strerror}; choose a writable place"
        else:
            message = f"{path} cannot be written: {_above(path, cause)}{cause.strerror}"
        raise InputError(message) from error


def _above(path: Path, error: OSError) -> str:
    """Which folder above `path` is in the way, if it is one."""
    inside = isinstance(error.filename, str) and str(path).startswith(f"{error.filename}{os.sep}")
    return f"{error.filename}: " if inside else ""


def os_error_in(error: BaseException) -> OSError | None:
    """The operating system's refusal behind an exception; None when there is none.

    Libraries written in Rust (safetensors, tokenizers) raise exceptions of their own, whose text
    ends in "(os error 28)"; others chain the `OSError` as the cause.
    """
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError):
            return seen
        number = _RUST_OS_ERROR.search(str(seen))
        if number is not None:
            return OSError(int(number[1]), os.strerror(int(number[1])))
        seen = seen.__cause__
    return None


def write_with(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary file beside `path`, then rename it into place.

    Raises `InputError` when the disk is full or the place cannot be written; the old file, if
    any, is then untouched.
    """
    _write(path, write, lambda temporary: temporary.replace(path))


def write_new_with(path: Path, write: Callable[[Path], None]) -> None:
    """As `write_with`, where nothing may stand at `path`, at the end as well as at the beginning.

    Raises `InputError` for what stands there, a file written meanwhile included; it is untouched.
    """

    def into_place(temporary: Path) -> None:
        # Unlike a rename, a link never takes the place of a file.
        try:
            os.link(temporary, path)
        except FileExistsError as error:
            raise InputError(f"{path} exists already: name a new file") from error
        temporary.unlink()

    if os.path.lexists(path):
        raise InputError(f"{path} exists already: name a new file")
    _write(path, write, into_place)


def _write(path: Path, write: Callable[[Path], None], into_place: Callable[[Path], object]) -> None:
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
            into_place(temporary)
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


def write_new_text(path: Path, content: str) -> None:
    """As `write_text`, where nothing may stand at `path`."""
    write_new_with(path, lambda temporary: _write_all(temporary, content.encode()))


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON to `path`; NaN and infinities are refused by `json`."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_directory(path: Path, fill: Callable[[Path], None]) -> None:
    """Let `fill` populate a temporary folder beside `path`, then rename it into place.

    `path` must be absent or an empty folder, at the end as well as at the beginning: the rename
    itself refuses one that was filled meanwhile, and `InputError` says so; nothing there changes.
    """
    target = Path(os.path.realpath(path))
    with _filled_beside(target, fill) as temporary:
        try:
            # rename(2) takes the place of an empty folder and of nothing else.
            os.rename(temporary, target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            raise InputError(
                f"{path} was filled by another process meanwhile; nothing in it was changed: "
                "choose a new or empty folder"
            ) from error


def replace_directory(path: Path, fill: Callable[[Path], None]) -> None:
    """As `write_directory`, for a folder of our own (a checkpoint, a model, a cache).

    One that stands there is replaced as a whole.
    """
    with _filled_beside(path, fill) as temporary:
        _swap_in(temporary, path)


@contextmanager
def _filled_beside(path: Path, fill: Callable[[Path], None]) -> Iterator[Path]:
    """A temporary folder beside `path`, filled and on the disk; it is gone afterwards."""
    with explain_os_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
        try:
            fill(temporary)
            _settle(temporary)
            yield temporary
            _flush(path.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def put_in_place(temporary: Path, path: Path) -> None:
    """Rename `temporary`, a filled folder beside `path`, to it, once all of it is on the disk.

    One that stands there is replaced as a whole.
    """
    with explain_os_errors(path):
        _settle(temporary)
        _swap_in(temporary, path)
        _flush(path.parent)


def _settle(temporary: Path) -> None:
    """Bring a filled temporary folder to the disk, and make it as readable as any other."""
    for file in sorted(temporary.rglob("*")):
        _flush(file)
    temporary.chmod(0o777 & ~_umask())


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
