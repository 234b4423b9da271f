"""Where records are kept, so that no evaluation is done twice."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import overload

import numpy as np
from numpy.typing import NDArray

from normattn.atomic import write_text
from normattn.errors import InputError
from normattn.reports.cell_record import RECORD_FORMAT
from normattn.reports.records import AnyRecord, read_record, record_text
from normattn.reports.retrieval_record import RetrievalRecord

Rows = tuple[tuple[int | float, ...], ...]


def evaluation_key(
    weights: str, spec: str, precision: str, data: str, edges: tuple[int, ...]
) -> str:
    """The name of one evaluation: a hash of all that decides its outcome."""
    parts = [RECORD_FORMAT, weights, spec, precision, data, list(edges)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


@overload
def rows_of(values: NDArray[np.int64] | NDArray[np.float64]) -> Rows: ...
@overload
def rows_of(values: None) -> None: ...
def rows_of(values: NDArray[np.int64] | NDArray[np.float64] | None) -> Rows | None:
    """A table of sums as a record holds it."""
    return None if values is None else tuple(tuple(row) for row in values.tolist())


def write_record(path: Path, record: AnyRecord) -> None:
    """Write one record, whole or not at all."""
    write_text(path, record_text(record))


class EvaluationStore:
    """A folder of records, one file per evaluation, named by its key.

    A damaged file is named on standard error and its evaluation is done again.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get(self, key: str) -> AnyRecord | None:
        """The record of an evaluation already done, or None."""
        path = self.path(key)
        if not path.exists():
            return None
        try:
            record = read_record(path)
            if record.key != key:
                raise InputError(f"{path} is damaged: it holds the evaluation {record.key}")
        except InputError as error:
            print(f"{error}; the evaluation is done again", file=sys.stderr)
            return None
        return record

    def put(self, record: AnyRecord) -> None:
        """Keep a record under its key."""
        write_record(self.path(record.key), record)

    def path(self, key: str) -> Path:
        """The file of one evaluation."""
        return self.folder / f"{key}.json"

    def records(self) -> list[AnyRecord]:
        """Every record of the folder in a fixed order; `InputError` names a damaged file."""
        paths = sorted(path for path in self.folder.glob("*.json") if path.name[0] != ".")
        return sorted((read_record(path) for path in paths), key=_order)


def _order(record: AnyRecord) -> tuple[str, str, int, str, str, int, str]:
    return (
        record.variant,
        record.method,
        record.seed,
        record.protocol,
        record.task if isinstance(record, RetrievalRecord) else "",
        record.length,
        record.key,
    )
