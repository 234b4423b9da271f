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
from itertools import islice, product
from pathlib import Path
from typing import Any, BinaryIO

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


def cached_folder(
    kind: str, key: object, build: Callable[[Path], object], cache_dir: Path | None = None
) -> Path:
    """Return the cache folder of `key` (JSON values); `build` fills it if it does not exist.

    The folder is complete or absent: `build` fills a temporary folder, which is renamed at the end.
    A lock lets one process build while others wait. A damaged folder is reported in a warning and
    built again. The next call resumes what a killed or failed build left behind. `cache_dir`
    defaults to `io.default_cache_dir`. Raises `InputError` if the cache cannot be written.
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
    """Return why a cache folder is unusable, or None. Only files that seem changed are hashed."""
    try:
        expected = read_object(path / MANIFEST)
        names = {file.name for file in path.iterdir()} - {MANIFEST}
        if not expected or expected.keys() != names:
            differing = min(expected.keys() ^ names, default="nothing")
            return f"is damaged ({MANIFEST} and the folder differ in {differing})"
        for name, (_, digest, recorded) in expected.items():
            same = list(file_identity((path / name).stat())) == recorded
            if not same and sha256_of(path / name) != digest:
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


@dataclass(frozen=True)
class Ragged(Sequence[Any]):
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
        """Map the column `name` that `write_splits` wrote into memory, read-only."""
        arrays = []
        for path, kind in ((folder / name, dtype), (folder / f"{name}.ends", "<i8")):
            empty = not path.stat().st_size  # An empty file cannot be mapped.
            arrays.append(np.empty(0, kind) if empty else np.asarray(np.memmap(path, kind, "r")))
        return cls(*arrays)


class Strings(Ragged):
    """Strings as UTF-8 rows of a ragged array ("u1"), so that millions need no Python objects."""

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index).tobytes().decode()


def utf8(text: str) -> np.ndarray:
    """Return a text as a row of `Strings`."""
    return np.frombuffer(text.encode("utf-8", "backslashreplace"), np.uint8)


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
    for leftover in folder.glob(".*"):  # Temporary files of a killed process.
        leftover.unlink()
    progress: dict[str, Any] = {"items": 0, "sizes": {}, "counts": {}}
    if (folder / PROGRESS).exists():
        progress = read_object(folder / PROGRESS)
    counts, done = Counter(progress["counts"]), progress["items"]
    with ExitStack() as stack:
        files = _open_columns(folder, columns, progress["sizes"], stack)
        saved = sum(file.tell() for file in files.values())
        for batch in _batches(islice(documents, done, None)):
            for split, row in encode(batch, counts):
                counts[split] += 1
                for name, values in row.items():
                    column, dtype = files[f"{split}.{name}"], np.dtype(columns[name])
                    column.write(np.asarray(values, dtype).tobytes())
                    end = np.int64(column.tell() // dtype.itemsize)
                    files[f"{split}.{name}.ends"].write(end.tobytes())
            done += len(batch)
            size = sum(file.tell() for file in files.values())
            if size - saved >= CHECKPOINT_BYTES:
                saved = size
                _save_progress(folder, done, counts, files)
        _save_progress(folder, done, counts, files)
    total = sum(counts[name] for name in SPLITS)
    empty = [name for name in required if not counts[name]]
    if not total or empty:
        for path in folder.iterdir():
            path.unlink()
        lacks = f"has no document in its {empty[0]} split ({total:,} in all)" if total else ""
        raise InputError(f"corpus {corpus!r} {lacks or 'is empty: it holds no text'}")
    return counts


def _open_columns(
    folder: Path, columns: Iterable[str], sizes: Mapping[str, int], stack: ExitStack
) -> dict[str, BinaryIO]:
    """Open the files of all columns for appending, after cutting them to the saved `sizes`."""
    files: dict[str, BinaryIO] = {}
    for split, column, ending in product(SPLITS, columns, ("", ".ends")):
        name = f"{split}.{column}{ending}"
        files[name] = file = stack.enter_context((folder / name).open("ab"))
        file.truncate(sizes.get(name, 0))
        file.seek(0, os.SEEK_END)
        if ending and not file.tell():
            file.write(np.int64(0).tobytes())
    return files


def _save_progress(
    folder: Path, done: int, counts: Mapping[str, int], files: Mapping[str, BinaryIO]
) -> None:
    for file in files.values():
        file.flush()
        os.fsync(file.fileno())
    sizes = {name: file.tell() for name, file in files.items()}
    io.write_json(folder / PROGRESS, {"items": done, "sizes": sizes, "counts": counts})


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
