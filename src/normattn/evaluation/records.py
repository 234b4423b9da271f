"""Where records are kept, so that no evaluation is done twice."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

from normattn.atomic import write_text
from normattn.errors import InputError
from normattn.reports.records import RECORD_FORMAT, Record, read_record, record_text

Rows = tuple[tuple[int | float, ...], ...]


def evaluation_key(
    weights: str, spec: str, precision: str, data: str, edges: tuple[int, ...]
) -> str:
    """The name of one evaluation: a hash of all that decides its outcome."""
    parts = [RECORD_FORMAT, weights, spec, precision, data, list(edges)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def write_record(path: Path, record: Record) -> None:
    """Write one record, whole or not at all."""
    write_text(path, record_text(record))


class EvaluationStore:
    """A folder of records, one file per evaluation, named by its key.

    A damaged file is named on standard error and its evaluation is done again.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get(self, key: str) -> Record | None:
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

    def put(self, record: Record) -> None:
        """Keep a record under its key."""
        write_record(self.path(record.key), record)

    def path(self, key: str) -> Path:
        """The file of one evaluation."""
        return self.folder / f"{key}.json"

    def records(self) -> list[Record]:
        """Every record of the folder in a fixed order; `InputError` names a damaged file."""
        paths = sorted(path for path in self.folder.glob("*.json") if path.name[0] != ".")
        return sorted((read_record(path) for path in paths), key=_order)


def _order(record: Record) -> tuple[str, str, int, str, int, str]:
    return (
        record.variant,
        record.method,
        record.seed,
        record.protocol,
        record.length,
        record.key,
    )
