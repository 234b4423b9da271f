"""Where the frames of single evaluations are kept, so that none is done twice."""

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
    """The name of one evaluation: a hash of all that decides its outcome (JSON values)."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


DONE = "done.json"
"""The markers of a store: see `MeasurementStore.finish`."""
BESIDE = "beside"
"""The folder, among a run's records, of those that its study did not ask for."""


class MeasurementStore:
    """A folder of frames, one file per evaluation, named by its key.

    A damaged file, or one of another evaluation, is named on standard error and its evaluation is
    done again. The file done.json holds a marker for each piece of work that was finished, with the
    keys of its evaluations: keys follow from data and weights, so they cannot be known beforehand.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._used: list[str] = []

    def path(self, key: str) -> Path:
        """The file of one evaluation."""
        return self.folder / f"{key}.parquet"

    def get(self, key: str) -> pl.DataFrame | None:
        """The frame of an evaluation already done, or None."""
        path = self.path(key)
        if not path.exists():
            return None
        if not path.is_file():
            raise InputError(f"{path} is not a file, so no record can be kept there: remove it")
        try:
            return measurements.read(path, key)
        except InputError as error:
            warn(f"normattn: {error}; the evaluation is done again")
            return None

    def put(self, key: str, measured: pl.DataFrame) -> None:
        """Keep a frame under its key, whole or not at all."""
        measurements.write(self.path(key), measured, key)

    def once(self, key: str, measure: Callable[[], pl.DataFrame]) -> pl.DataFrame:
        """The frame of an evaluation, made by `measure` and kept unless it was done already."""
        self._used.append(key)
        done = self.get(key)
        if done is not None:
            return done
        measured = measure()
        self.put(key, measured)
        return measured

    def finish(self, work: str) -> None:
        """Leave the marker of `work`, which took every evaluation since the last marker."""
        keys, self._used = sorted(set(self._used)), []
        write_json(self.folder / DONE, {**self._finished(), work: keys})

    def has_finished(self, work: str) -> bool:
        """Whether `work` has its marker, and every evaluation that it names is still here."""
        keys = self._finished().get(work)
        return bool(keys) and all(self.path(key).is_file() for key in keys or ())

    def _finished(self) -> dict[str, list[str]]:
        """The keys of every piece of work; none where the file is damaged."""
        try:
            stored = read_object(self.folder / DONE)
        except InputError:
            return {}
        return {
            work: keys
            for work, keys in stored.items()
            if isinstance(keys, list) and all(isinstance(key, str) for key in keys)
        }

    def __len__(self) -> int:
        return len(self._paths())

    def frame(self) -> pl.DataFrame:
        """Every frame of the folder as one; `InputError` names a damaged file."""
        return measurements.joined(measurements.read(path) for path in self._paths())

    def _paths(self) -> list[Path]:
        return sorted(path for path in self.folder.glob("*.parquet") if path.name[0] != ".")


def collected(out: Path) -> pl.DataFrame:
    """Every measurement below a study's directory, as one frame; frames of pages are copies.

    Records `BESIDE` those of a cell are not the study's.
    """
    paths = sorted(
        path
        for path in out.rglob("*.parquet")
        if path.name != measurements.FILE and path.parent != out and path.parent.name != BESIDE
    )
    return measurements.joined(measurements.read(path) for path in paths if path.name[0] != ".")
