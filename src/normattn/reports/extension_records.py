"""What `normattn extend` keeps: one file for every method × length × window, and their joining."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from normattn.atomic import write_json
from normattn.errors import InputError
from normattn.reports.cell_record import CellRecord
from normattn.reports.records import Record
from normattn.reports.retrieval_record import RetrievalRecord
from normattn.structured import read_object

AS_IS = "as is"


class KeyUnit(BaseModel):
    """One pass key asked for: under one method, at one length, in one window."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    kind: Literal["key"] = "key"
    format: Literal[1] = 1
    method: str
    length: int = Field(ge=1)
    window: int = Field(ge=0)
    record: RetrievalRecord

    @property
    def found(self) -> bool:
        """Whether every token of the answer is what greedy decoding would give."""
        return bool(self.record.counts("exact").all())


class TextUnit(BaseModel):
    """One window read once at one length under one method.

    prefill_seconds: of the decoder over the whole window without a cache. peak_bytes: how far the
    process grew beyond what it held with the model loaded (on a GPU: what torch allocated beyond
    it), or None where the system does not tell. threads: of the processor.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    kind: Literal["text"] = "text"
    format: Literal[1] = 1
    method: str
    length: int = Field(ge=1)
    window: int = Field(ge=0)
    records: tuple[Record, ...] = Field(min_length=1)
    prefill_seconds: float = Field(ge=0)
    peak_bytes: int | None
    device: str
    threads: int = Field(ge=1)


AnyUnit = TextUnit | KeyUnit
Kind = Literal["text", "key"]
_KINDS: dict[str, type[TextUnit] | type[KeyUnit]] = {"text": TextUnit, "key": KeyUnit}


class Place(NamedTuple):
    """Which unit: a window's text or its pass key, at a length, under a method."""

    kind: Kind
    method: str
    length: int
    window: int


@dataclass(frozen=True)
class Units:
    """The units of a run directory, each in a file of its own name."""

    folder: Path

    def path(self, place: Place) -> Path:
        """The file of one unit."""
        # Methods differ in more than what a file name bears, so the digest decides.
        stem = "".join(letter if letter.isalnum() else "-" for letter in place.method)
        name = f"{stem}-{hashlib.sha256(place.method.encode()).hexdigest()[:6]}"
        return self.folder / name / f"{place.kind}-{place.length}-{place.window}.json"

    def has(self, place: Place) -> bool:
        """Whether a unit is done."""
        return self.path(place).exists()

    def put(self, unit: AnyUnit) -> None:
        """Keep a unit, whole or not at all."""
        place = Place(unit.kind, unit.method, unit.length, unit.window)
        write_json(self.path(place), unit.model_dump(mode="json"))

    def every(self) -> list[AnyUnit]:
        """All units in a fixed order; `InputError` names a damaged file."""
        paths = sorted(path for path in self.folder.glob("*/*.json") if path.name[0] != ".")
        units = [_read(path) for path in paths]
        return sorted(units, key=lambda unit: (unit.method, unit.length, unit.window))


def whole(units: Sequence[AnyUnit], windows: int) -> list[list[TextUnit]]:
    """The texts of every method and length that was read in all its windows."""
    groups: dict[tuple[str, int], list[TextUnit]] = defaultdict(list)
    for unit in units:
        if isinstance(unit, TextUnit):
            groups[unit.method, unit.length].append(unit)
    return [group for group in groups.values() if len(group) == windows]


def joined(groups: Sequence[Sequence[TextUnit]]) -> list[Record]:
    """One record for every method, length and protocol: its windows are the rows."""
    return [
        _joined(parts)
        for group in groups
        for parts in zip(*(unit.records for unit in group), strict=True)
    ]


def _joined(parts: Sequence[Record]) -> Record:
    rows = ("documents", "tokens", "correct", "loss")
    together = {name: tuple(row for part in parts for row in getattr(part, name)) for name in rows}
    digests = {name: _digest(parts, name) for name in ("key", "data")}
    return parts[0].model_copy(update={**together, **digests})


def _digest(parts: Sequence[CellRecord], name: str) -> str:
    return hashlib.sha256(" ".join(getattr(part, name) for part in parts).encode()).hexdigest()


def _read(path: Path) -> AnyUnit:
    try:
        value = read_object(path)
        return _KINDS[value["kind"]].model_validate(value)
    except (ValidationError, ValueError, LookupError, TypeError) as error:
        raise InputError(f"{path} is damaged: delete it, and it is measured again") from error
