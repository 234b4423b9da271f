"""Reading files that others wrote: regular files only, of a bounded size, or a clear sentence."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from normattn.errors import InputError

_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)
_LONGEST_NAME, _LONGEST_PATH = 255, 4096


def expanded(path: str | Path) -> Path:
    """The path with `~` and `~user` resolved.

    Raises `InputError` for a user that does not exist, for a name longer than any file's and for
    one with a zero byte, which every later look at the path would otherwise stumble over.
    """
    text = str(path)
    if "\0" in text:
        raise InputError(f"{text!r} cannot be the name of a file: it holds a zero byte")
    try:
        # Before `~user` is looked up: the system has no name for what is no text either.
        os.fsencode(text)
        resolved = Path(text).expanduser()
    except UnicodeEncodeError as error:
        raise InputError(f"{text!r} cannot be the name of a file: it is no text") from error
    except RuntimeError as error:
        user = text[1:].partition("/")[0]
        lacking = f"there is no user {user!r}" if user else "this user has no home directory"
        raise InputError(f"{text} cannot be found: {lacking}; give a path without ~") from error
    raw = os.fsencode(resolved)
    longest = max((len(part) for part in raw.split(b"/")), default=0)
    if longest > _LONGEST_NAME or len(raw) > _LONGEST_PATH:
        raise InputError(
            f"{text!r} cannot be the name of a file: it has {max(longest, 1)} bytes between two "
            f"slashes and {len(raw)} in all, and at most {_LONGEST_NAME} and {_LONGEST_PATH} exist"
        )
    return resolved


def default_cache_dir() -> Path:
    """$NORMATTN_CACHE, else $XDG_CACHE_HOME/normattn, else ~/.cache/normattn."""
    own = os.environ.get("NORMATTN_CACHE")
    if own:
        return expanded(own)
    try:
        return expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "normattn"
    except InputError as error:
        raise InputError(f"no place for the cache: {error}, in NORMATTN_CACHE") from error


def refuse_irregular(path: Path, mode: int) -> None:
    """Raise `InputError` where `mode`, of a `stat`, is not that of a regular file.

    A pipe or a device may never end, and a second reading gives something else.
    """
    if stat.S_ISREG(mode):
        return
    kind = next((name for asks, name in _KINDS if asks(mode)), "no regular file")
    raise InputError(f"{path} cannot be read: it is {kind}, and a file was expected")


def stat_of(path: Path) -> os.stat_result:
    """What the system says of a file; `InputError` where it says nothing."""
    try:
        return path.stat()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error


def identity(status: os.stat_result) -> tuple[int, int, int, int]:
    """What differs once a file was written to, and between two files that look alike.

    Size and modification time can be set back; inode and change time are the system's own.
    """
    return status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns


@contextmanager
def open_file(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file for reading.

    Raises `InputError` when it is missing, unreadable, or a folder, a pipe or a device, also when
    that shows only while it is read.
    """
    try:
        # Opening a pipe would wait for its writer.
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        with open(handle, "rb") as file:
            refuse_irregular(path, os.fstat(handle).st_mode)
            yield file
    except FileNotFoundError as error:
        raise InputError(f"{path} does not exist") from error
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error


def read_bytes(path: Path, most: int) -> bytes:
    """The content of a regular file of at most `most` bytes; `InputError` as `open_file`."""
    with open_file(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise InputError(f"{path} is larger than {most:,} bytes, which none of its kind is")
    return content


def sha256_of(file: BinaryIO) -> str:
    """The SHA-256 of an open file, read block by block from where it stands."""
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()
