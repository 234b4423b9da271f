"""A store of finished evaluations, which are not repeated."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import polars as pl

from normattn.errors import InputError
from normattn.io import read_object, write_json
from normattn.lab.stats import measurements
from normattn.terminal import warn


def digest(*parts: object) -> str:
    """The key of an evaluation: a hash of everything that decides its result (JSON values)."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


DONE = "done.json"
"""The file of a store's markers; see `MeasurementStore.finish`."""
EXTRA = "beside"
"""The folder in a run's store for evaluations outside its study."""


class MeasurementStore:
    """A folder of measurements tables, one file per evaluation, named by its key.

    A damaged file causes a warning, and its evaluation is repeated. done.json has a marker for each
    finished task, with its keys, which depend on data and weights.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._used: list[str] = []

    def path(self, key: str) -> Path:
        """The file of one evaluation."""
        return self.folder / f"{key}.parquet"

    def get(self, key: str) -> pl.DataFrame | None:
        """The measurements of a finished evaluation, or None."""
        path = self.path(key)
        if not path.exists():
            return None
        try:
            return measurements.read(path)
        except InputError as error:
            warn(f"normattn: {error}; the evaluation is repeated")
            return None

    def put(self, key: str, measured: pl.DataFrame) -> None:
        """Store measurements under a key, atomically."""
        measurements.write(self.path(key), measured)

    def once(self, key: str, measure: Callable[[], pl.DataFrame]) -> pl.DataFrame:
        """Return the stored measurements of an evaluation, or call `measure` and store them."""
        self._used.append(key)
        stored = self.get(key)
        if stored is not None:
            return stored
        measured = measure()
        self.put(key, measured)
        return measured

    def finish(self, marker: str) -> None:
        """Write the marker of a task, with all evaluations since the last marker."""
        keys, self._used = sorted(set(self._used)), []
        write_json(self.folder / DONE, {**self._markers(), marker: keys})

    def has_finished(self, marker: str) -> bool:
        """Whether the marker exists, and all its evaluations are still stored."""
        keys = self._markers().get(marker)
        return bool(keys) and all(self.path(key).is_file() for key in keys or ())

    def _markers(self) -> dict[str, list[str]]:
        """The keys of each marker; empty where the file is missing or damaged."""
        try:
            return read_object(self.folder / DONE)
        except InputError:
            return {}

    def __len__(self) -> int:
        return len(self._paths())

    def frame(self) -> pl.DataFrame:
        """All measurements of the folder; raises `InputError` for a damaged file."""
        return measurements.concat(measurements.read(path) for path in self._paths())

    def _paths(self) -> list[Path]:
        return sorted(path for path in self.folder.glob("*.parquet") if path.name[0] != ".")


def read_measurements(out: Path) -> pl.DataFrame:
    """All measurements below a study's directory, without copies in reports and folders `EXTRA`."""
    paths = sorted(
        path
        for path in out.rglob("*.parquet")
        if path.name != measurements.FILE and path.parent != out and path.parent.name != EXTRA
    )
    return measurements.concat(measurements.read(path) for path in paths if path.name[0] != ".")
