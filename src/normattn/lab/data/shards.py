"""A long sequence of numbers in files of a bounded size: written in order, read as one array."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from normattn.errors import InputError
from normattn.io import open_file

MOST_OPEN = 256
"""Files open at a time, of the 1,024 that a process may have."""
UNDIVIDED = 1 << 62
"""The shard length of a sequence that stands in one file."""
_PART_BYTES = 1 << 22


class CannotResumeError(InputError):
    """What an interrupted writer left does not fit together."""


def shard_paths(folder: Path, name: str, length: int, shard_length: int) -> list[Path]:
    """The files `name.00000`, … of a sequence of `length` values; an empty one has a file too."""
    count = max(1, -(-length // shard_length))
    return [folder / f"{name}.{number:05}" for number in range(count)]


class ShardWriter:
    """Appends values of `dtype` to the files `name.00000`, … of a folder, `shard_length` to each.

    With `length` it goes on where a writer before it was interrupted: as many values are kept, and
    what stands behind them is cut off. Raises `CannotResumeError` where fewer are there.
    """

    def __init__(
        self, folder: Path, name: str, dtype: np.dtype[Any], shard_length: int, length: int = 0
    ) -> None:
        self.length = length
        self._folder = folder
        self._name = name
        self._dtype = dtype
        self._shard_length = shard_length
        self._file: BinaryIO | None = None
        self._cut()

    @property
    def whole(self) -> int:
        """How many files are full."""
        return self.length // self._shard_length

    def append(self, values: np.ndarray) -> None:
        """Write `values` behind those that are there."""
        values = values.astype(self._dtype, copy=False)
        while len(values):
            room = self._shard_length - self.length % self._shard_length
            if self._file is None:
                self._file = (self._folder / f"{self._name}.{self.whole:05}").open("ab")
            self._file.write(values[:room].tobytes())
            self.length += min(room, len(values))
            values = values[room:]
            if self.length % self._shard_length == 0:
                self.close()

    def sync(self) -> None:
        """Bring all that was written to the disk."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Sync, and close the file that is open."""
        if self._file is not None:
            self.sync()
            self._file.close()
            self._file = None

    def _cut(self) -> None:
        kept = shard_paths(self._folder, self._name, self.length, self._shard_length)
        if self.length == 0:
            kept[0].write_bytes(b"")
        for path in set(self._folder.glob(f"{self._name}.[0-9]*")) - set(kept):
            path.unlink()
        left = self.length
        for path in kept:
            size = min(left, self._shard_length) * self._dtype.itemsize
            there = path.stat().st_size if path.exists() else 0
            if there < size:
                raise CannotResumeError(f"{path.name} has {there:,} bytes instead of {size:,}")
            os.truncate(path, size)
            left -= self._shard_length


class TokenShards:
    """`length` values of `dtype` in `paths`: each file but the last holds `shard_length` of them.

    A slice may cross the borders of files. Only what a slice holds is read, by position: a file
    that is cut meanwhile is named in an `InputError`, where reading it through a memory mapping
    would end the process (SIGBUS). Raises `InputError`, naming the file, where one is gone or has
    another size than it must have.
    """

    def __init__(
        self, paths: Sequence[Path], dtype: np.dtype[Any], length: int, shard_length: int
    ) -> None:
        self.dtype = np.dtype(dtype)
        self._paths = tuple(paths)
        self._length = length
        self._shard_length = shard_length
        self._open: OrderedDict[int, tuple[BinaryIO, ExitStack]] = OrderedDict()

    def __len__(self) -> int:
        return self._length

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenShards, (self._paths, self.dtype, self._length, self._shard_length)

    def __getitem__(self, index: slice) -> np.ndarray:
        """The values of a slice without a step, as a new array."""
        start, stop, step = index.indices(self._length)
        if step != 1:
            raise ValueError(f"a slice of shards has no step, got {step}")
        size = self._shard_length
        numbers = range(start // size, -(-stop // size)) if start < stop else range(0)
        parts = [
            self._read(n, max(0, start - n * size), min(size, stop - n * size)) for n in numbers
        ]
        return parts[0] if len(parts) == 1 else np.concatenate([np.zeros(0, self.dtype), *parts])

    def parts(self) -> Iterator[np.ndarray]:
        """All values from first to last, 4 MiB at a time."""
        step = _PART_BYTES // self.dtype.itemsize
        for start in range(0, self._length, step):
            yield self[start : start + step]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Everything at once, which may be more than the memory holds."""
        return np.asarray(self[:], dtype)

    def _read(self, number: int, start: int, stop: int) -> np.ndarray:
        """Values `start` … `stop` of one file."""
        file, width = self._file(number), self.dtype.itemsize
        content = _read_at(file, start * width, (stop - start) * width)
        if len(content) != (stop - start) * width:
            self._check(number, os.fstat(file.fileno()).st_size)
        return np.frombuffer(content, self.dtype)

    def _file(self, number: int) -> BinaryIO:
        """The open file of a shard; the one that was used least lately makes room for it."""
        if number not in self._open:
            if len(self._open) >= MOST_OPEN:
                self._open.popitem(last=False)[1][1].close()
            with ExitStack() as stack:
                file = stack.enter_context(open_file(self._paths[number]))
                self._check(number, os.fstat(file.fileno()).st_size)
                self._open[number] = file, stack.pop_all()
        self._open.move_to_end(number)
        return self._open[number][0]

    def _check(self, number: int, size: int) -> None:
        rest = self._length - number * self._shard_length
        expected = min(self._shard_length, rest) * self.dtype.itemsize
        if size != expected:
            raise InputError(
                f"{self._paths[number]} has {size:,} bytes instead of {expected:,}: these cached "
                "tokens are damaged; rerun the command to make them again"
            )


def _read_at(file: BinaryIO, position: int, size: int) -> bytes:
    if hasattr(os, "pread"):  # leaves alone the file's own position, which forked processes share
        return os.pread(file.fileno(), size, position)
    file.seek(position)
    return file.read(size)
