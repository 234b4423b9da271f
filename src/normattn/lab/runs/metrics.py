"""Metrics as JSON lines: appended, flushed about once a second, cut back to a step on resume.

A line holds what the run computed and no clock times, so the files of two runs of the same
configuration are equal byte for byte, stopped and resumed or not.
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
from normattn.lab.runs.status import unchanged

FLUSH_SECONDS = 1.0


class MetricsLog:
    """Append-only lines `{"step": …, …}` in `path`, in order of steps."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines = 0
        self._file: TextIOWrapper | None = None
        self._flushed = 0.0

    def truncate_after(self, step: int) -> int:
        """Drop the lines after `step` and a half-written last one; return how many lines stay.

        Raises `InputError` when a line that should stay is damaged.
        """
        self.close()
        self.lines = 0
        if not self.path.exists():
            return 0
        with explain_os_errors(self.path), self.path.open("r+b") as file:
            end = 0
            for record, line in _records(file, self.path):
                if record["step"] > step:
                    break
                end += len(line)
                self.lines += 1
            file.truncate(end)
            os.fsync(file.fileno())
        return self.lines

    def append(self, record: Mapping[str, Any]) -> None:
        """Add one line; it reaches the file within about a second."""
        with explain_os_errors(self.path):
            if self._file is None:
                self._file = self.path.open("a", encoding="utf-8", buffering=1 << 20)
            self._file.write(json.dumps(record, allow_nan=False) + "\n")
            self.lines += 1
            now = time.monotonic()
            if now - self._flushed > FLUSH_SECONDS:
                self._file.flush()
                self._flushed = now

    def flush(self) -> None:
        """Bring every line to the disk itself, safe from a loss of power."""
        if self._file is not None:
            with explain_os_errors(self.path):
                self._file.flush()
                os.fsync(self._file.fileno())

    def close(self) -> None:
        """Flush and close; a later `append` opens the file again."""
        if self._file is not None:
            with explain_os_errors(self.path):
                file, self._file = self._file, None
                file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Every whole line of the metrics file `path`; [] when there is none yet.

    A half-written last line is left out; a damaged one before it raises `InputError`, as does a
    file of an ended run that is not as the run left it.
    """
    if not unchanged(path).exists():
        return []
    with open_file(path) as file:
        return [record for record, _ in _records(file, path)]


def _records(file: BinaryIO, path: Path) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Every whole line, parsed and as bytes; of a damaged one only the last may be left out."""
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
