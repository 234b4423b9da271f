"""The status of a run, which other processes may read, and the digests of its final files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import ConfigDict, ValidationError

from normattn.errors import InputError
from normattn.io import read_object, sha256_of
from normattn.settings import Settings, explain

State = Literal["running", "interrupted", "finished", "diverged"]


class RunStatus(Settings):
    """The status of a run: its state, `step` of `steps`, and maybe a message.

    For a diverged run, `where` says what was first not finite (a module's output, the loss or a
    gradient), and `checkpoint` is the last good checkpoint. For a finished or diverged run, `files`
    has the SHA-256 of its files (logs, tokenisers, labels) by name; the model's folder has its own.
    """

    model_config = ConfigDict(strict=True)

    state: State
    step: int
    steps: int
    message: str = ""
    where: str = ""
    checkpoint: str | None = None
    files: Mapping[str, str] = {}


def read_status(path: Path) -> RunStatus | None:
    """Return the status of the run in `path`; None if it has not started."""
    file = path / "status.json"
    if not file.exists():
        return None
    try:
        return RunStatus.model_validate(read_object(file))
    except ValidationError as error:
        raise InputError(f"{file} is damaged: {explain(error)}; delete it and rerun") from None


def require_finished(run: Path, use: str) -> None:
    """Raise `InputError` if the run has not finished; `use` says what a finished run can do."""
    status = read_status(run)
    if status is None or status.state != "finished":
        state = f"is {status.state} at step {status.step}" if status else "has not begun"
        raise InputError(f"the run in {run} {state}; only a finished run can {use}")


def check_unchanged(file: Path) -> Path:
    """Return a file of a run; `InputError` if it has changed since the run ended."""
    status = read_status(file.parent)
    expected = None if status is None else status.files.get(file.name)
    if expected is None:
        return file
    if not file.is_file():
        raise InputError(f"{file} is missing: restore it, or train the run again")
    if sha256_of(file) != expected:
        raise InputError(
            f"{file} is damaged: it does not match its digest in "
            f"{file.with_name('status.json')}; restore it, or train the run again"
        )
    return file
