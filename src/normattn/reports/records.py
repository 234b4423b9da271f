"""The record of one evaluated cell: what a protocol counted, as JSON, and how it is read back.

A cell is one trained run, one post-hoc method, one protocol and one context length. `Record` holds
sums per window and position bin, `RetrievalRecord` sums per sample and depth.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError, model_validator

from normattn.errors import InputError
from normattn.reports.cell_record import (
    RECORD_FORMAT,
    CellRecord,
    FloatRows,
    Rows,
    check_bounded,
    checked_array,
)
from normattn.reports.retrieval_record import RetrievalRecord
from normattn.structured import read_object

Protocol = Literal["train_length", "non_repeated", "repeated", "last_segment", "by_position"]


class Record(CellRecord):
    """Sums of one cell, with windows as rows and position bins as columns.

    Position t (0-based) is the position of the query whose next token is scored: it sees t + 1
    tokens. Bin b holds the positions `edges[b] <= t < edges[b + 1]`; the first edge is the first
    scored position and the last edge is `length`. `loss` is summed in nats. `seen_tokens` and
    `seen_correct` count the tokens whose answer stands earlier in the context (repeated protocol
    only, otherwise None).
    """

    protocol: Protocol
    edges: tuple[int, ...] = Field(min_length=2)
    tokens: Rows
    correct: Rows
    loss: FloatRows
    seen_tokens: Rows | None = None
    seen_correct: Rows | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Record:
        shape = (len(self.documents), len(self.edges) - 1)
        if any(a >= b for a, b in zip(self.edges, self.edges[1:], strict=False)):
            raise ValueError("the bin edges do not increase")
        if self.edges[0] < 0 or self.edges[-1] != self.length:
            raise ValueError(f"the bin edges do not end at the length {self.length}")
        tokens = checked_array(self.tokens, shape, "tokens")
        check_bounded(checked_array(self.correct, shape, "correct"), tokens, "correct", "tokens")
        checked_array(self.loss, shape, "loss")
        if (self.seen_tokens is None) != (self.seen_correct is None):
            raise ValueError("seen_tokens and seen_correct belong together")
        if self.seen_tokens is not None and self.seen_correct is not None:
            seen = checked_array(self.seen_tokens, shape, "seen_tokens")
            check_bounded(seen, tokens, "seen_tokens", "tokens")
            correct = checked_array(self.seen_correct, shape, "seen_correct")
            check_bounded(correct, seen, "seen_correct", "seen_tokens")
        return self

    def counts(self, field: str) -> NDArray[np.float64]:
        """A field of sums as an array (windows, bins); zeros where the protocol has no such sums.

        `field`: "tokens", "correct", "loss", "seen_tokens" or "seen_correct".
        """
        rows = getattr(self, field)
        if rows is None:
            return np.zeros((len(self.documents), len(self.edges) - 1))
        return np.asarray(rows, dtype=np.float64)


AnyRecord = Record | RetrievalRecord


def record_text(record: AnyRecord) -> str:
    """The record as JSON text, one field a line, closed by a digest of its own content."""
    fields = record.model_dump(mode="json")
    fields["digest"] = _digest(fields)
    lines = (f"{json.dumps(name)}: {_compact(value)}" for name, value in fields.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def parse_record(value: Mapping[str, Any] | Record, source: str = "record") -> Record:
    """Check a mapping (as read from JSON) and make it a `Record`; retrieval is refused."""
    record = parse_any(value, source)
    if isinstance(record, RetrievalRecord):
        raise InputError(f"{source} is a record of retrieval, which has no bins of positions")
    return record


def parse_any(value: Mapping[str, Any] | AnyRecord, source: str = "record") -> AnyRecord:
    """Check a mapping (as read from JSON) and make it the record of its protocol.

    `source` names the file or place in messages. A "digest" is compared when there is one.
    Raises `InputError` naming `source` when a field is missing, unknown or inconsistent.
    """
    if isinstance(value, CellRecord):
        return value
    fields = dict(value)
    digest = fields.pop("digest", None)
    if digest is not None and digest != _digest(fields):
        raise InputError(f"{source} is damaged: its content does not match its digest")
    if fields.get("format") != RECORD_FORMAT:
        found = fields.get("format")
        raise InputError(
            f"{source} is not an evaluation record of format {RECORD_FORMAT} (found {found!r})"
        )
    kind = RetrievalRecord if fields.get("protocol") == "retrieval" else Record
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "the record"
        raise InputError(f"{source} is damaged: {place}: {first['msg']}") from None


def read_record(path: Path) -> AnyRecord:
    """Read and check one record file; `InputError` names the file when it cannot be used."""
    value = read_object(path)
    if "digest" not in value:
        raise InputError(f"{path} is damaged: its digest is missing")
    return parse_any(value, str(path))


def _compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _digest(fields: Mapping[str, Any]) -> str:
    text = json.dumps(dict(fields), sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()
