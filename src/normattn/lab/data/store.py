"""Prepared data on disk: folders that are built once and checked, and arrays of ragged rows."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64
from numpy.typing import ArrayLike

from normattn import io
from normattn.errors import InputError
from normattn.io import default_cache_dir, file_identity, read_object, sha256_of
from normattn.lab.data.sources import SPLITS, Document, SplitName
from normattn.locks import locked

CHECKPOINT_BYTES = 64 << 20
"""So much is written between two points from which an interrupted preparation can go on."""
MANIFEST, PROGRESS, ABOUT = "manifest.json", "progress.json", "about.json"
_BATCH_CHARACTERS, _BATCH_ITEMS = 1 << 18, 64


# Folders.


def prepared(
    kind: str, decides: object, build: Callable[[Path], object], cache_dir: Path | None = None
) -> Path:
    """Return the folder of what `decides` (JSON values) names; `build` fills it where it is absent.

    The folder is whole or absent: `build` fills a temporary one, which is renamed at the end.
    Processes that ask at the same time wait on a file lock and build once. A damaged folder is
    named in a warning and built again. What a killed or failed build has left is given to the next
    one: a lost connection or a full disk costs nothing that was done before. `cache_dir` defaults
    to $NORMATTN_CACHE, $XDG_CACHE_HOME/normattn or ~/.cache/normattn. Raises `InputError` where it
    cannot be written.
    """
    digest = hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:32]
    path = (cache_dir or default_cache_dir()) / f"{kind}-{digest}"
    if path.exists() and damage(path) is None:
        return path
    with locked(path.with_name(f"{path.name}.lock")), io.explain_os_errors(path):
        if path.exists():
            problem = damage(path)
            if problem is None:
                return path
            warnings.warn(f"the cache {path} {problem}; it is built again", stacklevel=2)
        for leftover in path.parent.glob(f".{path.name}.old.*"):
            shutil.rmtree(leftover, ignore_errors=True)
        begun = path.with_name(f".{path.name}.begun")
        begun.mkdir(exist_ok=True)
        try:
            build(begun)
            files = sorted(file for file in begun.iterdir() if file.is_file())
            entries = {
                file.name: [file.stat().st_size, sha256_of(file), file_identity(file.stat())]
                for file in files
            }
            io.write_json(begun / MANIFEST, entries)
            io.put_in_place(begun, path)
        finally:
            with suppress(OSError):  # A build that has done nothing leaves nothing.
                begun.rmdir()
    return path


def damage(path: Path) -> str | None:
    """Say why a prepared folder cannot be used; None when it is whole.

    A file whose size, inode and times are those of the manifest is not read again; any other one,
    of a copied folder for example, must have the recorded content.
    """
    try:
        expected = read_object(path / MANIFEST)
        there = {file.name for file in path.iterdir()} - {MANIFEST}
        if not expected or expected.keys() != there:
            odd = min(expected.keys() ^ there, default="nothing")
            return f"is damaged ({MANIFEST} and the folder differ in {odd})"
        for name, (size, digest, state) in expected.items():
            status = (path / name).stat()
            same = status.st_size == size and list(file_identity(status)) == state
            if not same and (status.st_size != size or sha256_of(path / name) != digest):
                return f"is damaged (the content of {name} has changed)"
    except (OSError, InputError) as error:
        return f"is damaged ({error})"
    except (TypeError, ValueError):
        return f"is damaged ({MANIFEST} has another form)"
    return None


def column_digests(folder: Path, name: str) -> tuple[str, str]:
    """The sha256 of a ragged array's values, and of where its rows end."""
    with io.open_file(folder / f"{name}.ends") as file:
        file.seek(8)  # The first row always begins at 0.
        return sha256_of(folder / name), sha256_of(file)


# Arrays.


class FileArray:
    """A one-dimensional array in a file, read-only: a slice is read from the file when needed.

    It is not mapped into memory, because a file that is cut short under a mapping ends the process
    by a signal. Such a file is an `InputError` here. A read costs about as much as with a mapping:
    the pages are the system's cache in both cases.
    """

    def __init__(self, path: Path, dtype: str) -> None:
        self.dtype = np.dtype(dtype)
        self._path = path
        self._file = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)
        self._length = os.fstat(self._file).st_size // self.dtype.itemsize

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, slice):
            return self[index : index + 1][0] if index >= 0 else self[index + len(self)]
        start, stop, step = index.indices(len(self))
        if step != 1:
            raise IndexError("a file is read in slices of step 1")
        wanted = max(0, stop - start) * self.dtype.itemsize
        raw = self._read(start * self.dtype.itemsize, wanted)
        return np.frombuffer(raw, self.dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self[:], dtype)

    def _read(self, offset: int, size: int) -> bytes:
        parts = [b""]
        while size:  # The system reads at most 2 GiB at once.
            part = os.pread(self._file, size, offset)
            if not part:
                raise InputError(
                    f"{self._path} was cut short while it was in use: {size:,} bytes are missing "
                    f"at {offset:,}; run the command again to prepare the data again"
                )
            parts.append(part)
            offset, size = offset + len(part), size - len(part)
        return parts[1] if len(parts) == 2 else b"".join(parts)


Values = np.ndarray | FileArray


@dataclass(frozen=True)
class Ragged(Sequence[np.ndarray]):
    """Rows of different lengths: row i is `values[offsets[i] : offsets[i + 1]]`."""

    values: Values
    offsets: Values

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(index)
        start, stop = self.offsets[index : index + 2].tolist()
        return self.values[start:stop]

    @cached_property
    def lengths(self) -> Int64[np.ndarray, "rows"]:
        """The length of every row."""
        return np.diff(np.asarray(self.offsets))

    @classmethod
    def load(cls, folder: Path, name: str, dtype: str) -> Ragged:
        """Open the files that `fill` wrote."""
        return cls(FileArray(folder / name, dtype), FileArray(folder / f"{name}.ends", "<i8"))


class Names(Sequence[str]):
    """Texts kept as UTF-8 in a ragged array: millions of them need no Python objects."""

    def __init__(self, rows: Ragged) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self._rows[index + len(self) if index < 0 else index].tobytes().decode()


def utf8(text: str) -> np.ndarray:
    """Return a text as a row of `Names`."""
    return np.frombuffer(text.encode("utf-8", "replace"), np.uint8)


# Filling a folder.


Row = tuple[SplitName, Mapping[str, ArrayLike]]
"""A row of a split: its value in every column."""


def fill(
    folder: Path,
    corpus: str,
    columns: Mapping[str, str],
    documents: Iterable[Document],
    encode: Callable[[list[Document], Counter[str]], Iterable[Row]],
    needed: Collection[SplitName] = SPLITS,
) -> Counter[str]:
    """Write the rows of some documents into the arrays `SPLIT.COLUMN`; return what was counted.

    `columns` are the columns and their types. `encode` makes rows of a batch of documents; it sees
    the running counts, in which `train` and so on are the rows of each split, and may add to them.
    Every 64 MiB the progress is written: a call after an interruption passes over the documents
    that it counts without encoding them, and leaves the same bytes as one call. Progress that does
    not fit the files is named in a warning, and everything is made again. Raises `InputError`, and
    empties the folder, where no split or not every `needed` one of the `corpus` has a row.
    """
    begun = _begun(folder)
    counts, done, saved = Counter(begun["counts"]), begun["items"], 0
    with ExitStack() as stack:
        arrays = {
            f"{split}.{name}": _Array(folder, f"{split}.{name}", dtype, begun["sizes"], stack)
            for split in SPLITS
            for name, dtype in columns.items()
        }

        def save() -> None:
            sizes = {name: size for array in arrays.values() for name, size in array.sync().items()}
            io.write_json(folder / PROGRESS, {"items": done, "sizes": sizes, "counts": counts})

        for batch in _batches(islice(documents, done, None)):
            for split, row in encode(batch, counts):
                counts[split] += 1
                for name, values in row.items():
                    arrays[f"{split}.{name}"].append(values)
            done += len(batch)
            written = sum(array.written for array in arrays.values())
            if written - saved >= CHECKPOINT_BYTES:
                saved = written
                save()
        save()
    total = sum(counts[name] for name in SPLITS)
    empty = [name for name in needed if not counts[name]]
    if not total or empty:
        for file in folder.iterdir():
            file.unlink()
        lacks = f"has no document in its {empty[0]} split ({total:,} in all)" if total else ""
        raise InputError(f"corpus {corpus!r} {lacks or 'is empty: it holds no text'}")
    return counts


def _begun(folder: Path) -> dict[str, Any]:
    """What an interrupted call has left: documents read, bytes of each file, what was counted."""
    nothing: dict[str, Any] = {"items": 0, "sizes": {}, "counts": {}}
    for leftover in folder.glob(".*"):  # A process that is killed leaves its temporary files.
        leftover.unlink()
    if not (folder / PROGRESS).exists():
        return nothing
    try:
        begun = read_object(folder / PROGRESS)
        if begun.keys() != nothing.keys():
            raise InputError(f"{PROGRESS} does not hold items, sizes and counts")
        for name, size in begun["sizes"].items():
            there = (folder / name).stat().st_size
            if there < size:
                raise InputError(f"{name} has {there:,} bytes instead of {size:,}")
    except (InputError, OSError) as error:
        warnings.warn(f"{folder} was begun, but {error}; it is made again", stacklevel=4)
        return nothing
    return begun


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Groups of documents that are small enough to hold."""
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.text)
        if size >= _BATCH_CHARACTERS or len(batch) >= _BATCH_ITEMS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class _Array:
    """Appends rows to a ragged array on disk, behind the bytes that count."""

    def __init__(
        self, folder: Path, name: str, dtype: str, sizes: Mapping[str, int], stack: ExitStack
    ) -> None:
        self.written = 0
        self._dtype = np.dtype(dtype)
        self._files = {
            file: stack.enter_context((folder / file).open("ab")) for file in (name, f"{name}.ends")
        }
        for file, opened in self._files.items():
            opened.truncate(sizes.get(file, 0))
            opened.seek(0, 2)
        self._values, self._ends = self._files.values()
        if self._ends.tell() == 0:
            self._ends.write(np.int64(0).tobytes())

    def append(self, values: ArrayLike) -> None:
        """Write one row."""
        row = np.asarray(values, self._dtype)
        self.written += self._values.write(row.tobytes())
        self.written += self._ends.write(
            np.int64(self._values.tell() // self._dtype.itemsize).tobytes()
        )

    def sync(self) -> dict[str, int]:
        """Bring everything to the disk; return the size of each file."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        return {name: file.tell() for name, file in self._files.items()}
