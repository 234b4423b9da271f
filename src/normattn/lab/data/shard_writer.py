"""Writes a long sequence into files of a bounded size, one after another."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from normattn.errors import InputError

UNDIVIDED = 1 << 62
"""The shard length of a sequence that stands in one file."""


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
