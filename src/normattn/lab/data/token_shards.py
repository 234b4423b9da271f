"""A sequence of tokens in several memory-mapped files, read as one."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64

from normattn.errors import InputError
from normattn.files import open_file

MOST_OPEN = 256
"""Shards mapped at a time: every one takes a file handle, of which a process may have 1,024."""
_PART_BYTES = 1 << 22


class TokenShards:
    """`length` values of `dtype` in `paths`: each file but the last holds `shard_length` of them.

    A slice, and what `take` gathers, may cross the borders of files. A file is mapped when
    something in it is first asked for, and of its pages only those are read: the system is told not
    to read ahead (MADV_RANDOM). Raises `InputError`, naming the file, where one is gone or has
    another size than it must have.
    """

    def __init__(
        self, paths: Sequence[Path], dtype: np.dtype[Any], length: int, shard_length: int
    ) -> None:
        self.dtype = np.dtype(dtype)
        self._paths = tuple(paths)
        self._length = length
        self._shard_length = shard_length
        self._mapped: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        return self._length

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenShards, (self._paths, self.dtype, self._length, self._shard_length)

    @property
    def mapped(self) -> frozenset[int]:
        """The numbers of the files that are mapped."""
        return frozenset(self._mapped)

    def __getitem__(self, index: slice) -> np.ndarray:
        """The values of a slice without a step: a view inside one file, a copy across borders."""
        start, stop, step = index.indices(self._length)
        if step != 1:
            raise ValueError(f"a slice of shards has no step, got {step}")
        size = self._shard_length
        numbers = range(start // size, -(-stop // size)) if start < stop else ()
        parts = [
            self._shard(number)[max(0, start - number * size) : stop - number * size]
            for number in numbers
        ]
        if len(parts) == 1:
            return parts[0]
        return np.concatenate([np.zeros(0, self.dtype), *parts])

    def take(self, index: Int64[np.ndarray, "*shape"]) -> np.ndarray:
        """The values at `index`, in its shape; `IndexError` for one that is not there."""
        flat = index.ravel()
        if len(flat) and not 0 <= flat.min() <= flat.max() < self._length:
            raise IndexError(f"of {self._length:,} values, got {flat.min():,} … {flat.max():,}")
        if len(self._paths) == 1 or not len(flat):
            return self._shard(0).take(index)
        numbers = flat // self._shard_length
        # A window stands in one file, or two: there are hardly more runs than windows.
        borders = np.flatnonzero(np.diff(numbers)) + 1
        values = np.empty(flat.shape, self.dtype)
        for start, stop in pairwise([0, *borders.tolist(), len(flat)]):
            number = int(numbers[start])
            inside = flat[start:stop] - number * self._shard_length
            values[start:stop] = self._shard(number).take(inside)
        return values.reshape(index.shape)

    def parts(self) -> Iterator[np.ndarray]:
        """All values from first to last, 4 MiB at a time: read, not mapped."""
        for number, path in enumerate(self._paths):
            with open_file(path) as file:
                self._check(number, os.fstat(file.fileno()).st_size)
                while raw := file.read(_PART_BYTES):
                    yield np.frombuffer(raw, self.dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Everything at once, which may be more than the memory holds."""
        values: np.ndarray = np.asarray(self[:], dtype)
        return values.copy() if copy else values

    def _shard(self, number: int) -> np.ndarray:
        shard = self._mapped.get(number)
        if shard is None:
            if len(self._mapped) >= MOST_OPEN:
                del self._mapped[next(iter(self._mapped))]
            shard = self._mapped[number] = self._map(number)
        return shard

    def _map(self, number: int) -> np.ndarray:
        with open_file(self._paths[number]) as file:
            size = os.fstat(file.fileno()).st_size
            self._check(number, size)
            if size == 0:  # an empty file cannot be mapped
                return np.zeros(0, self.dtype)
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if hasattr(mmap, "MADV_RANDOM"):
            content.madvise(mmap.MADV_RANDOM)
        return np.frombuffer(content, self.dtype)

    def _check(self, number: int, size: int) -> None:
        rest = self._length - number * self._shard_length
        expected = min(self._shard_length, rest) * self.dtype.itemsize
        if size != expected:
            raise InputError(
                f"{self._paths[number]} has {size:,} bytes instead of {expected:,}: these cached "
                "tokens are damaged; rerun the command to make them again"
            )
