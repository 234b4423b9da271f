"""Records as files: one JSON object each, checked when it is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from normattn.atomic import write_text
from normattn.errors import InputError
from normattn.structured import read_object

Kind = TypeVar("Kind", bound=BaseModel)


def write_file(path: Path, record: BaseModel) -> None:
    """Write one record, whole or not at all."""
    value = record.model_dump(mode="json")
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    write_text(path, text + "\n")


def read_file(path: Path, kind: type[Kind], what: str) -> Kind:
    """Read one record; `InputError` names the file that cannot be read or is no record `what`."""
    value = read_object(path)
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise InputError(f"{path} is no record {what}: {first_of(error)}") from None


def first_of(error: ValidationError) -> str:
    """The first thing that is wrong, in one line: where, and what."""
    found = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in found["loc"])
    return f"{where}: {found['msg']}" if where else str(found["msg"])
