"""A sequence of tokens in several files, read as one."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from normattn.errors import InputError
from normattn.files import open_file

MOST_OPEN = 256
"""Files open at a time, of the 1,024 that a process may have."""
_PART_BYTES = 1 << 22


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
