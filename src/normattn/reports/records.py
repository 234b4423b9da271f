"""The record of one evaluated cell: what a protocol counted, as JSON, and how it is read back.

A cell is one trained run, one post-hoc method, one protocol and one context length. The record
holds sums per window and position bin, never rates, so that any statistic (and any resampling of
documents) can be made from it later without the model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from normattn.errors import InputError

RECORD_FORMAT: Literal[1] = 1

Protocol = Literal["train_length", "non_repeated", "repeated", "last_segment"]

Rows = tuple[tuple[int, ...], ...]
FloatRows = tuple[tuple[float, ...], ...]


class Record(BaseModel):
    """Sums of one cell, with windows as rows and position bins as columns.

    Position t (0-based) is the position of the query whose next token is scored: it sees t + 1
    tokens. Bin b holds the positions `edges[b] <= t < edges[b + 1]`; the first edge is the first
    scored position and the last edge is `length`. `loss` is summed in nats. `seen_tokens` and
    `seen_correct` count the tokens whose answer stands earlier in the context (repeated protocol
    only, otherwise None). `weights` and `data` are fingerprints, `key` names the evaluation.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    format: Literal[1] = RECORD_FORMAT
    key: str
    run: str
    seed: int
    variant: str
    method: str
    name: str
    spec: str
    protocol: Protocol
    length: int = Field(ge=1)
    train_length: int = Field(ge=1)
    precision: str = "fp32"
    weights: str
    data: str
    documents: tuple[str, ...] = Field(min_length=1)
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
        tokens = _array(self.tokens, shape, "tokens")
        _bounded(_array(self.correct, shape, "correct"), tokens, "correct", "tokens")
        _array(self.loss, shape, "loss")
        if (self.seen_tokens is None) != (self.seen_correct is None):
            raise ValueError("seen_tokens and seen_correct belong together")
        if self.seen_tokens is not None and self.seen_correct is not None:
            seen = _array(self.seen_tokens, shape, "seen_tokens")
            _bounded(seen, tokens, "seen_tokens", "tokens")
            correct = _array(self.seen_correct, shape, "seen_correct")
            _bounded(correct, seen, "seen_correct", "seen_tokens")
        return self

    def counts(self, field: str) -> NDArray[np.float64]:
        """A field of sums as an array (windows, bins); zeros where the protocol has no such sums.

        `field`: "tokens", "correct", "loss", "seen_tokens" or "seen_correct".
        """
        rows = getattr(self, field)
        if rows is None:
            return np.zeros((len(self.documents), len(self.edges) - 1))
        return np.asarray(rows, dtype=np.float64)


def _array(rows: Rows | FloatRows, shape: tuple[int, int], name: str) -> NDArray[np.float64]:
    if len(rows) != shape[0] or any(len(row) != shape[1] for row in rows):
        raise ValueError(f"{name} is not of {shape[0]} windows by {shape[1]} bins")
    return np.asarray(rows, dtype=np.float64)


def _bounded(
    part: NDArray[np.float64], whole: NDArray[np.float64], part_name: str, whole_name: str
) -> None:
    if np.any(part < 0) or np.any(part > whole):
        raise ValueError(f"a count of {part_name} is not between 0 and its {whole_name}")


def record_text(record: Record) -> str:
    """The record as JSON text, one field a line, closed by a digest of its own content."""
    fields = record.model_dump(mode="json")
    fields["digest"] = _digest(fields)
    lines = (f"{json.dumps(name)}: {_compact(value)}" for name, value in fields.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def parse_record(value: Mapping[str, Any] | Record, source: str = "record") -> Record:
    """Check a mapping (as read from JSON) and make it a `Record`.

    `source` names the file or place in messages. A "digest" is compared when there is one.
    Raises `InputError` naming `source` when a field is missing, unknown or inconsistent.
    """
    if isinstance(value, Record):
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
    try:
        return Record.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "the record"
        raise InputError(f"{source} is damaged: {place}: {first['msg']}") from None


def read_record(path: Path) -> Record:
    """Read and check one record file; `InputError` names the file when it cannot be used."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError:
        raise InputError(f"{path} is damaged: it is not whole JSON text") from None
    if not isinstance(value, dict):
        raise InputError(f"{path} is damaged: expected a JSON object")
    if "digest" not in value:
        raise InputError(f"{path} is damaged: its digest is missing")
    return parse_record(value, str(path))


def _compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _digest(fields: Mapping[str, Any]) -> str:
    text = json.dumps(dict(fields), sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()
