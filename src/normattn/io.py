"""Files: bounded reading and atomic writing of text, JSON, TOML and safetensors."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import shutil
import stat
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, AnyStr, BinaryIO

from normattn.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers for a full disk."""
MAX_BYTES = 64 << 20
"""Maximum size of a JSON file and of a line of JSON lines."""
MAX_TOML_BYTES = 1 << 20
_JSON_BITS, _TOML_BITS = 256, 63
_RUST_OS_ERROR = re.compile(r"\(os error (\d{1,4})\)")


def expand_path(path: str | Path) -> Path:
    """Expand `~` and `~user`; `InputError` for an impossible file name or an unknown home."""
    try:
        resolved = Path(path).expanduser()
        resolved.lstat()
    except (ValueError, RuntimeError) as error:
        raise InputError(f"{str(path)!r} cannot be the name of a file: {error}") from error
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise InputError(f"{str(path)!r} cannot be the name of a file: too long") from error
    return resolved


def default_cache_dir() -> Path:
    """Return $NORMATTN_CACHE, else $XDG_CACHE_HOME/normattn, else ~/.cache/normattn."""
    if folder := os.environ.get("NORMATTN_CACHE"):
        return expand_path(folder)
    return expand_path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "normattn"


def file_status(path: Path) -> os.stat_result:
    """Return `path.stat()`; `InputError` if it fails."""
    try:
        return path.stat()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error


def file_identity(status: os.stat_result) -> tuple[int, int, int, int]:
    """Return numbers that change if a file is written to: inode and change time cannot be reset."""
    return status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns


@contextmanager
def open_file(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file for reading; `InputError`, also while reading, if that fails."""
    try:
        # Opening a pipe would wait for its writer.
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        with open(handle, "rb") as file:
            if not stat.S_ISREG(os.fstat(handle).st_mode):  # A pipe may never end.
                raise InputError(f"{path} cannot be read: it is not a regular file")
            yield file
    except FileNotFoundError as error:
        raise InputError(f"{path} does not exist") from error
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error


def read_bytes(path: Path, max_bytes: int) -> bytes:
    """Read a regular file of at most `max_bytes`; `InputError` as in `open_file`."""
    with open_file(path) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise InputError(
            f"{path} is larger than {max_bytes:,} bytes, too large for a file of its kind"
        )
    return content


def sha256_of(file: BinaryIO | Path) -> str:
    """Return the SHA-256 of a file, or of the rest of an open one."""
    if isinstance(file, Path):
        with open_file(file) as opened:
            return sha256_of(opened)
    digest = hashlib.sha256()
    while chunk := file.read(1 << 20):
        digest.update(chunk)
    return digest.hexdigest()


def read_json(path: Path, max_bytes: int = MAX_BYTES) -> Any:
    """Read the value in a JSON file; `InputError` as in `parse_json`."""
    return parse_json(read_bytes(path, max_bytes), str(path))


def read_object(path: Path, max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """Read the object in a JSON file; `InputError` if it is missing, damaged or no object."""
    value = read_json(path, max_bytes)
    if not isinstance(value, dict):
        raise InputError(f"{path} is damaged: expected a JSON object, found {type(value).__name__}")
    return value


def parse_json(content: bytes | str, where: str) -> Any:
    """Parse JSON of `where`; `InputError` also for NaN, infinities and integers beyond 256 bits."""
    from pydantic_core import from_json

    try:
        value = from_json(content, allow_inf_nan=False)
        _check_numbers(value, _JSON_BITS, finite=True)
    except ValueError as error:
        raise InputError(f"{where} is damaged: it is not valid JSON ({error})") from error
    return value


def _check_numbers(value: Any, bits: int, finite: bool) -> None:
    """Raise `ValueError` for an integer of more than `bits`, and unless floats are `finite`."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for member in value:
            _check_numbers(member, bits, finite)
    elif isinstance(value, float) and finite and not math.isfinite(value):
        raise ValueError("a number is beyond every floating-point number")
    elif isinstance(value, int) and not -(2**bits) <= value < 2**bits:
        raise ValueError(f"an integer has more than {bits} bits")


def json_lines(
    readline: Callable[[int], AnyStr], where: Callable[[int], str]
) -> Iterator[tuple[int, AnyStr]]:
    """Yield number (from 1) and content of each line; `InputError` at `where(n)` above 64 MiB."""
    number = 0
    while line := readline(MAX_BYTES + 1):
        number += 1
        if len(line) > MAX_BYTES:
            raise InputError(f"{where(number)} is longer than {MAX_BYTES:,} bytes")
        yield number, line


def read_toml(path: Path) -> dict[str, Any]:
    """Read the table in a TOML file; `InputError` if it is not TOML in UTF-8."""
    content = read_bytes(path, MAX_TOML_BYTES)
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text ({error.reason})") from error
    return parse_toml(text, str(path))


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """Parse TOML; `InputError` for invalid TOML and integers of more than 63 bits."""
    try:
        table = tomllib.loads(text)
        _check_numbers(table, _TOML_BITS, finite=False)
    except RecursionError as error:
        raise InputError(f"{where} is not valid TOML: it is nested too deeply") from error
    except ValueError as error:
        raise InputError(f"{where} is damaged: it is not valid TOML ({error})") from error
    return table


@contextmanager
def explain_os_errors(path: Path) -> Iterator[None]:
    """Turn an OS error, even one that a library wraps, into an `InputError` about `path`."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        cause = os_error_in(error)
        if cause is None or cause.errno is None:
            raise
        if cause.errno in DISK_FULL:
            message = f"no space left on the disk that holds {path}; make room and run it again"
        else:
            message = f"{path} cannot be written: {cause.strerror}; choose a writable place"
        raise InputError(message) from error


def os_error_in(error: BaseException) -> OSError | None:
    """Return the `OSError` that caused an exception, or None.

    Rust libraries (safetensors, tokenizers) raise other types, whose text ends in "(os error 28)".
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError):
            return cause
        match = _RUST_OS_ERROR.search(str(cause))
        if match is not None:
            return OSError(int(match[1]), os.strerror(int(match[1])))
        cause = cause.__cause__
    return None


def write_with(path: Path, write: Callable[[Path], object], new: bool = False) -> None:
    """Write a file atomically: `write` fills a temporary file, which is flushed and renamed.

    Raises `InputError`, and keeps the old file, if that fails; with `new` also if the file exists.
    """
    if new and os.path.lexists(path):
        raise InputError(f"{path} exists already: choose a new file")
    with explain_os_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        os.close(handle)
        temporary = Path(name)
        try:
            write(temporary)
            _flush(temporary)
            # mkstemp makes files private; give it the permissions of any new file.
            temporary.chmod(0o666 & ~_umask())
            temporary.replace(path)
            _flush(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


def write_bytes(path: Path, content: bytes) -> None:
    """Write `content` to `path` atomically."""
    write_with(path, lambda temporary: temporary.write_bytes(content))


def write_text(path: Path, content: str, new: bool = False) -> None:
    """Write `content` as UTF-8 to `path` atomically; `new` as in `write_with`."""
    write_with(path, lambda temporary: temporary.write_bytes(content.encode()), new)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON to `path` atomically, without NaN and infinities."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_directory(path: Path, fill: Callable[[Path], None], replace: bool = False) -> None:
    """Write a folder atomically: `fill` fills a temporary folder, which is renamed to `path`.

    Raises `InputError`, and changes nothing, unless `path` is absent or an empty folder. With
    `replace`, an existing folder is replaced as a whole.
    """
    target = path if replace else Path(os.path.realpath(path))
    with explain_os_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        try:
            fill(temporary)
            _move_folder(temporary, target, replace)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def put_in_place(temporary: Path, path: Path) -> None:
    """Rename `temporary`, a filled folder next to `path`, to `path`; replace an older one."""
    with explain_os_errors(path):
        _move_folder(temporary, path, replace=True)


def _move_folder(temporary: Path, path: Path, replace: bool) -> None:
    """Flush a folder to the disk, then rename it."""
    for file in sorted(temporary.rglob("*")):
        _flush(file)
    temporary.chmod(0o777 & ~_umask())
    if replace and path.exists():
        old = Path(tempfile.mkdtemp(prefix=f".{path.name}.old.", dir=path.parent))
        try:
            path.replace(old / "old")
            temporary.replace(path)
        finally:
            shutil.rmtree(old, ignore_errors=True)
    else:
        # rename(2) replaces only an empty folder.
        os.rename(temporary, path)
    _flush(path.parent)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    """Return the process's umask, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write tensors, which must not share memory, as safetensors; return the SHA-256."""
    from safetensors.torch import save

    # Serialised first, so that a full disk raises an OSError.
    content = save({name: x.detach().cpu().contiguous() for name, x in tensors.items()})
    path.write_bytes(content)
    return hashlib.sha256(content).hexdigest()


def read_tensors(path: Path, sha256: str) -> dict[str, Tensor]:
    """Read tensors into separate CPU memory; `InputError` if the file is missing or damaged."""
    from safetensors import SafetensorError, safe_open

    check_digest(path, sha256)
    try:
        with safe_open(path, "pt") as file:
            # Copied, because the file may change while its tensors are in use.
            return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path} is damaged: {error}") from error


def check_digest(path: Path, sha256: str) -> None:
    """Raise `InputError` if a file is missing or its SHA-256 differs."""
    if sha256_of(path) != sha256:
        raise InputError(f"{path} is damaged: its SHA-256 does not match the one on record")
