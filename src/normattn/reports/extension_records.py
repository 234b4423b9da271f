"""What `normattn extend` keeps: one file for every method × length × window, and their joining."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from normattn.atomic import write_json
from normattn.errors import InputError
from normattn.reports.cell_record import CellRecord
from normattn.reports.records import Record
from normattn.reports.retrieval_record import RetrievalRecord

AS_IS = "as is"


class ExtensionUnit(BaseModel):
    """One window read once at one length under one method.

    prefill_seconds: of the decoder over the whole window without a cache. peak_bytes: how far the
    process grew beyond what it held with the model loaded (on a GPU: what torch allocated beyond
    it), or None where the system does not tell. threads: of the processor.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    format: Literal[1] = 1
    method: str
    length: int = Field(ge=1)
    window: int = Field(ge=0)
    records: tuple[Record, ...] = Field(min_length=1)
    passkey: RetrievalRecord | None
    prefill_seconds: float = Field(ge=0)
    peak_bytes: int | None
    device: str
    threads: int = Field(ge=1)

    @property
    def spec(self) -> str:
        """The method with every parameter."""
        return self.records[0].spec


@dataclass(frozen=True)
class Units:
    """The units of a run directory, each in a file of its own name."""

    folder: Path

    def path(self, method: str, length: int, window: int) -> Path:
        """The file of one unit."""
        # Methods differ in more than what a file name bears, so the digest decides.
        stem = "".join(letter if letter.isalnum() else "-" for letter in method)
        name = f"{stem}-{hashlib.sha256(method.encode()).hexdigest()[:6]}"
        return self.folder / name / f"{length}-{window}.json"

    def get(self, method: str, length: int, window: int) -> ExtensionUnit | None:
        """A unit that is done, or None."""
        path = self.path(method, length, window)
        return _read(path) if path.exists() else None

    def put(self, unit: ExtensionUnit) -> None:
        """Keep a unit, whole or not at all."""
        write_json(self.path(unit.method, unit.length, unit.window), unit.model_dump(mode="json"))

    def every(self) -> list[ExtensionUnit]:
        """All units in a fixed order."""
        paths = sorted(path for path in self.folder.glob("*/*.json") if path.name[0] != ".")
        units = [_read(path) for path in paths]
        return sorted(units, key=lambda unit: (unit.method, unit.length, unit.window))


def whole(units: Sequence[ExtensionUnit], windows: int) -> list[list[ExtensionUnit]]:
    """The units of every method and length that was read in all its windows."""
    groups: dict[tuple[str, int], list[ExtensionUnit]] = defaultdict(list)
    for unit in units:
        groups[unit.method, unit.length].append(unit)
    return [group for group in groups.values() if len(group) == windows]


def joined(groups: Sequence[Sequence[ExtensionUnit]]) -> list[Record]:
    """One record for every method, length and protocol: its windows are the rows."""
    found = []
    for group in groups:
        for parts in zip(*(unit.records for unit in group), strict=True):
            found.append(_joined(parts))
    return found


def _joined(parts: Sequence[Record]) -> Record:
    rows = ("documents", "tokens", "correct", "loss")
    together = {name: tuple(row for part in parts for row in getattr(part, name)) for name in rows}
    digests = {name: _digest(parts, name) for name in ("key", "data")}
    return parts[0].model_copy(update={**together, **digests})


def _digest(parts: Sequence[CellRecord], name: str) -> str:
    return hashlib.sha256(" ".join(getattr(part, name) for part in parts).encode()).hexdigest()


def _read(path: Path) -> ExtensionUnit:
    try:
        return ExtensionUnit.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except (ValidationError, ValueError) as error:
        raise InputError(f"{path} is damaged: delete it, and it is measured again") from error
