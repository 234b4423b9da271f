"""What is wrong with a record that cannot be read, in a few words."""

from __future__ import annotations

from pydantic import ValidationError


def first_of(error: ValidationError | UnicodeDecodeError) -> str:
    """The first thing that is wrong, in one line: where, and what."""
    if isinstance(error, UnicodeDecodeError):
        return error.reason
    found = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in found["loc"])
    return f"{where}: {found['msg']}" if where else str(found["msg"])
