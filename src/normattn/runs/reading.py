"""Reading small JSON files that a run wrote: whole, or a clear sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from normattn.errors import InputError


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; `InputError` when it is missing, damaged or no object."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise InputError(f"{path} is missing") from error
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise InputError(f"{path} is damaged: it is not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise InputError(f"{path} is damaged: expected a JSON object, found {type(value).__name__}")
    return value
