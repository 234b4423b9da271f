"""Named tensors in a safetensors file, held against the file's SHA-256."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from normattn.errors import InputError
from normattn.files import open_file, sha256_of


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write tensors, which must not share memory, and return the file's SHA-256."""
    # As bytes first: a full disk is then an OSError that says so.
    content = save({name: x.detach().cpu().contiguous() for name, x in tensors.items()})
    path.write_bytes(content)
    return hashlib.sha256(content).hexdigest()


def read_tensors(path: Path, sha256: str) -> dict[str, Tensor]:
    """The tensors of a file, on the CPU, each in memory of its own.

    Raises `InputError` where the file is missing, has another digest or is no safetensors file.
    """
    check_digest(path, sha256)
    try:
        with safe_open(path, "pt") as file:
            # Copied: the file may change while its tensors are in use.
            return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path} is damaged: {error}") from error


def check_digest(path: Path, sha256: str) -> None:
    """Raise `InputError` where a file is missing or its SHA-256 is another."""
    with open_file(path) as file:
        found = sha256_of(file)
    if found != sha256:
        raise InputError(f"{path} is damaged: its SHA-256 does not match the one on record")
