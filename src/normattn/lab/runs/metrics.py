"""Metrics as JSON lines: appended, flushed at most once a second, truncated on resume.

Lines have no clock times, so that equal configurations, resumed or not, give the same bytes.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from io import TextIOWrapper
from pathlib import Path
from typing import Any, BinaryIO

from normattn.errors import InputError
from normattn.io import explain_os_errors, json_lines, open_file, parse_json
from normattn.lab.runs.status import check_unchanged


class MetricsLog:
    """Append-only lines `{"step": …, …}` in `path`, in order of steps."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: TextIOWrapper | None = None
        self._flushed = 0.0

    def truncate_after(self, step: int) -> None:
        """Delete the lines after `step` and a partial last line; `InputError` if one is damaged."""
        self.close()
        if not self.path.exists():
            return
        with explain_os_errors(self.path), self.path.open("r+b") as file:
            end = 0
            for record, line in _records(file, self.path):
                if record["step"] > step:
                    break
                end += len(line)
            file.truncate(end)
            os.fsync(file.fileno())

    def append(self, record: Mapping[str, Any]) -> None:
        """Append a line, and flush the file if the last flush was over a second ago."""
        with explain_os_errors(self.path):
            if self._file is None:
                self._file = self.path.open("a", encoding="utf-8", buffering=1 << 20)
            self._file.write(json.dumps(record, allow_nan=False) + "\n")
            now = time.monotonic()
            if now - self._flushed > 1.0:
                self._file.flush()
                self._flushed = now

    def flush(self) -> None:
        """Write every line to the disk (fsync)."""
        if self._file is not None:
            with explain_os_errors(self.path):
                self._file.flush()
                os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file; a later `append` opens it again."""
        if self._file is not None:
            with explain_os_errors(self.path):
                file, self._file = self._file, None
                file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return every complete line of the metrics file `path`; [] if it does not exist.

    Skips a partial last line. Raises `InputError` for damage, and if an ended run has changed.
    """
    if not check_unchanged(path).exists():
        return []
    with open_file(path) as file:
        return [record for record, _ in _records(file, path)]


def _records(file: BinaryIO, path: Path) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Yield every complete line, parsed and as bytes; a partial last line is skipped."""
    for number, line in json_lines(file.readline, lambda n: f"{path}, line {n},"):
        if not line.endswith(b"\n"):
            return
        try:
            record = parse_json(line, "a metrics line")
        except InputError:
            record = None
        if not isinstance(record, dict) or type(record.get("step")) is not int:
            raise InputError(f"{path} is damaged: line {number} is not a metrics line")
        yield record, line
