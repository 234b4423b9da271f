"""How far a run is, as other processes may read it, and what its files were when it ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from normattn.errors import InputError
from normattn.io import open_file, read_object, sha256_of

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
    stored = read_object(file)
    problem = _status_problem(stored)
    if problem is not None:
        raise InputError(f"{file} is damaged: {problem}; rerun the run's command to write it again")
    return RunStatus(**stored)


def _status_problem(stored: dict[str, Any]) -> str | None:
    """What is wrong with the fields of a status, in words."""
    kinds: dict[str, tuple[type, ...]] = {
        "state": (str,),
        "step": (int,),
        "steps": (int,),
        "message": (str,),
        "where": (str,),
        "checkpoint": (str, type(None)),
        "files": (dict,),
    }
    for name, kind in kinds.items():
        if name not in stored and name in ("state", "step", "steps"):
            return f"it lacks {name!r}"
        if name in stored and type(stored[name]) not in kind:
            return f"{name} is {stored[name]!r:.40}, expected {kind[0].__name__}"
    unknown = sorted(set(stored) - set(kinds))
    if unknown:
        return f"unknown field {unknown[0]!r:.40}"
    if stored["state"] not in get_args(State):
        return f"unknown state {stored['state']!r:.40}"
    return None


def require_finished(run: Path, use: str) -> None:
    """Raise `InputError` where the run in `run` has not finished; `use` is what it is asked for."""
    status = read_status(run)
    if status is None or status.state != "finished":
        state = f"is {status.state} at step {status.step}" if status else "has not begun"
        raise InputError(f"the run in {run} {state}; only a finished run can {use}")


def digests_of_files(run: Path) -> dict[str, str]:
    """The digest of each file that a run leaves, by name."""
    files = (file for file in sorted(run.iterdir()) if file.is_file() and file.name[0] != ".")
    return {file.name: _digest(file) for file in files if file.name not in _OTHER}


def unchanged(file: Path) -> Path:
    """The file of a run, after an `InputError` where the run has ended and left it otherwise."""
    status = read_status(file.parent)
    wanted = None if status is None else status.files.get(file.name)
    if wanted is None:
        return file
    if not file.is_file():
        raise InputError(f"{file} is gone: restore it, or train the run again")
    if _digest(file) != wanted:
        raise InputError(
            f"{file} is damaged: it is not as the run left it, by its digest in "
            f"{file.with_name('status.json')}; restore it, or train the run again"
        )
    return file


def _digest(path: Path) -> str:
    with open_file(path) as file:
        return sha256_of(file)
