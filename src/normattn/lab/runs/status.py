"""How far a run is, as other processes may read it, and what its files were when it ended."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

from normattn.errors import InputError
from normattn.io import read_object, sha256_of

State = Literal["running", "interrupted", "finished", "diverged"]
_OTHER = {"config.json", "status.json", "environment.json", "timing.jsonl"}
"""What is checked otherwise, may change, or differs from one run to its equal."""


@dataclass(frozen=True)
class RunStatus:
    """How far a run is: `step` of `steps` done, and one sentence where there is more to say.

    Of a run that diverged, `where` is the module whose output was first not finite, `checkpoint`
    the last good checkpoint. Of a run that has ended, `files` are the SHA-256 digests of its files
    (logs, tokenisers, labels) by name; the model's folder has its own.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)

    state: State
    step: int
    steps: int
    message: str = ""
    where: str = ""
    checkpoint: str | None = None
    files: Mapping[str, str] = field(default_factory=dict)


def read_status(path: Path) -> RunStatus | None:
    """The status of the run in `path`; None when it has not begun."""
    file = path / "status.json"
    if not file.exists():
        return None
    try:
        # As JSON, since a strict dataclass is made of nothing else.
        return TypeAdapter(RunStatus).validate_json(json.dumps(read_object(file)))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(map(str, first["loc"]))
        raise InputError(
            f"{file} is damaged: {name}: {first['msg']}; rerun the run's command to write it again"
        ) from None


def require_finished(run: Path, use: str) -> None:
    """Raise `InputError` where the run in `run` has not finished; `use` is what it is asked for."""
    status = read_status(run)
    if status is None or status.state != "finished":
        state = f"is {status.state} at step {status.step}" if status else "has not begun"
        raise InputError(f"the run in {run} {state}; only a finished run can {use}")


def digests_of_files(run: Path) -> dict[str, str]:
    """The digest of each file that a run leaves, by name."""
    files = (file for file in sorted(run.iterdir()) if file.is_file() and file.name[0] != ".")
    return {file.name: sha256_of(file) for file in files if file.name not in _OTHER}


def unchanged(file: Path) -> Path:
    """The file of a run, after an `InputError` where the run has ended and left it otherwise."""
    status = read_status(file.parent)
    wanted = None if status is None else status.files.get(file.name)
    if wanted is None:
        return file
    if not file.is_file():
        raise InputError(f"{file} is missing: restore it, or train the run again")
    if sha256_of(file) != wanted:
        raise InputError(
            f"{file} is damaged: it does not match its digest in "
            f"{file.with_name('status.json')}; restore it, or train the run again"
        )
    return file
