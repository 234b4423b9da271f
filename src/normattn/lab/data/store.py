"""Prepared data on disk: verified cache folders, and ragged arrays in files."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import warnings
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
"""Bytes between checkpoints, from which an interrupted preparation can resume."""
MANIFEST, PROGRESS, ABOUT = "manifest.json", "progress.json", "about.json"
_BATCH_CHARACTERS, _BATCH_DOCUMENTS = 1 << 18, 64


# Cache folders.


def cached_folder(
    kind: str, key: object, build: Callable[[Path], object], cache_dir: Path | None = None
) -> Path:
    """Return the cache folder of `key` (JSON values); `build` fills it if it does not exist.

    The folder is complete or absent: `build` fills a temporary folder, which is renamed at the end.
    A lock lets one process build while others wait. A damaged folder is reported in a warning and
    built again. The next call resumes what a killed or failed build left behind. `cache_dir`
    defaults to $NORMATTN_CACHE, $XDG_CACHE_HOME/normattn or ~/.cache/normattn. Raises `InputError`
    if the cache cannot be written.
    """
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]
    path = (cache_dir or default_cache_dir()) / f"{kind}-{digest}"
    if path.exists() and find_damage(path) is None:
        return path
    with locked(path.with_name(f"{path.name}.lock")), io.explain_os_errors(path):
        if path.exists():
            problem = find_damage(path)
            if problem is None:
                return path
            warnings.warn(f"the cache {path} {problem}; it is built again", stacklevel=2)
        for leftover in path.parent.glob(f".{path.name}.old.*"):
            shutil.rmtree(leftover, ignore_errors=True)
        unfinished = path.with_name(f".{path.name}.begun")
        unfinished.mkdir(exist_ok=True)
        try:
            build(unfinished)
            io.write_json(
                unfinished / MANIFEST,
                {
                    file.name: [file.stat().st_size, sha256_of(file), file_identity(file.stat())]
                    for file in sorted(unfinished.iterdir())
                    if file.is_file()
                },
            )
            io.put_in_place(unfinished, path)
        finally:
            with suppress(OSError):  # Removes it only if the build wrote nothing.
                unfinished.rmdir()
    return path


def find_damage(path: Path) -> str | None:
    """Return why a cache folder cannot be used, or None if it is complete.

    A file is hashed only if its size, inode or times differ from the manifest, as in a copy.
    """
    try:
        expected = read_object(path / MANIFEST)
        names = {file.name for file in path.iterdir()} - {MANIFEST}
        if not expected or expected.keys() != names:
            differing = min(expected.keys() ^ names, default="nothing")
            return f"is damaged ({MANIFEST} and the folder differ in {differing})"
        for name, (size, digest, recorded) in expected.items():
            status = (path / name).stat()
            same = status.st_size == size and list(file_identity(status)) == recorded
            if not same and (status.st_size != size or sha256_of(path / name) != digest):
                return f"is damaged (the content of {name} has changed)"
    except (OSError, InputError) as error:
        return f"is damaged ({error})"
    except (TypeError, ValueError):
        return f"is damaged ({MANIFEST} has another form)"
    return None


def column_digests(folder: Path, name: str) -> tuple[str, str]:
    """Return the SHA-256 of a ragged array's values and that of its row ends."""
    with io.open_file(folder / f"{name}.ends") as file:
        file.seek(8)  # The first offset is always 0.
        return sha256_of(folder / name), sha256_of(file)


# Arrays.


def read_array(path: Path, dtype: str) -> np.ndarray:
    """Return the one-dimensional array in a file, read-only and mapped into memory."""
    if not path.stat().st_size:  # An empty file cannot be mapped.
        return np.empty(0, dtype)
    return np.asarray(np.memmap(path, dtype, "r"))


@dataclass(frozen=True)
class Ragged(Sequence[np.ndarray]):
    """Rows of different lengths: row i is `values[offsets[i] : offsets[i + 1]]`."""

    values: np.ndarray
    offsets: np.ndarray

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
        return np.diff(self.offsets)

    @classmethod
    def load(cls, folder: Path, name: str, dtype: str) -> Ragged:
        """Open the column `name` that `write_splits` wrote."""
        return cls(read_array(folder / name, dtype), read_array(folder / f"{name}.ends", "<i8"))


class Strings(Sequence[str]):
    """Strings stored as UTF-8 rows of a ragged array, so that millions need no Python objects."""

    def __init__(self, rows: Ragged) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        return self._rows[index].tobytes().decode()

    @classmethod
    def load(cls, folder: Path, name: str) -> Strings:
        """Open the column `name` that `write_splits` wrote."""
        return cls(Ragged.load(folder, name, "u1"))


def utf8(text: str) -> np.ndarray:
    """Return a text as a row of `Strings`."""
    return np.frombuffer(text.encode("utf-8", "backslashreplace"), np.uint8)


# Writing the splits of a corpus.


Row = tuple[SplitName, Mapping[str, ArrayLike]]
"""A split, and a row of it: the value of each column."""


def write_splits(
    folder: Path,
    corpus: str,
    columns: Mapping[str, str],
    documents: Iterable[Document],
    encode: Callable[[list[Document], Counter[str]], Iterable[Row]],
    required: Collection[SplitName] = SPLITS,
) -> Counter[str]:
    """Encode documents into ragged arrays, files `SPLIT.COLUMN` in `folder`; return the counts.

    `columns` maps names to dtypes. `encode` turns a batch of documents into rows. It sees the
    running counts, which hold the number of rows of each split, and may add to them. Progress is
    saved every 64 MiB. A call after an interruption skips the documents that are already encoded
    and writes the same bytes as one call would. Raises `InputError`, and empties the folder, if the
    corpus has no rows or a `required` split has none.
    """
    progress = _read_progress(folder)
    counts, done, saved = Counter(progress["counts"]), progress["items"], 0
    with ExitStack() as stack:
        writers = {
            f"{split}.{name}": _ColumnWriter(
                folder, f"{split}.{name}", dtype, progress["sizes"], stack
            )
            for split in SPLITS
            for name, dtype in columns.items()
        }

        def save_progress() -> None:
            sizes = {name: size for w in writers.values() for name, size in w.sync().items()}
            io.write_json(folder / PROGRESS, {"items": done, "sizes": sizes, "counts": counts})

        for batch in _batches(islice(documents, done, None)):
            for split, row in encode(batch, counts):
                counts[split] += 1
                for name, values in row.items():
                    writers[f"{split}.{name}"].append(values)
            done += len(batch)
            written = sum(writer.written for writer in writers.values())
            if written - saved >= CHECKPOINT_BYTES:
                saved = written
                save_progress()
        save_progress()
    total = sum(counts[name] for name in SPLITS)
    empty = [name for name in required if not counts[name]]
    if not total or empty:
        for file in folder.iterdir():
            file.unlink()
        lacks = f"has no document in its {empty[0]} split ({total:,} in all)" if total else ""
        raise InputError(f"corpus {corpus!r} {lacks or 'is empty: it holds no text'}")
    return counts


def _read_progress(folder: Path) -> dict[str, Any]:
    """Return what an interrupted call saved: documents done, sizes of files, counts."""
    for leftover in folder.glob(".*"):  # Temporary files of a killed process.
        leftover.unlink()
    if not (folder / PROGRESS).exists():
        return {"items": 0, "sizes": {}, "counts": {}}
    return read_object(folder / PROGRESS)


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document.text)
        if characters >= _BATCH_CHARACTERS or len(batch) >= _BATCH_DOCUMENTS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


class _ColumnWriter:
    """Appends rows to a ragged array on disk, after cutting its files to the saved `sizes`."""

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
        self.written += self._values.write(np.asarray(values, self._dtype).tobytes())
        end = np.int64(self._values.tell() // self._dtype.itemsize)
        self.written += self._ends.write(end.tobytes())

    def sync(self) -> dict[str, int]:
        """Flush both files to the disk; return their sizes."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        return {name: file.tell() for name, file in self._files.items()}
