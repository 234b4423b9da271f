"""A run directory: one configuration, one writer, and a status that other processes may read.

Layout: `config.json` (kind and the whole resolved configuration), `status.json`, `metrics.jsonl`,
`timing.jsonl`, `environment.json`, `checkpoints/`, `.lock`, and whatever the kind of run adds.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel

from normattn.atomic import explain_os_errors, write_json
from normattn.errors import InputError
from normattn.runs.checkpoints import Checkpoints
from normattn.runs.metrics import MetricsLog
from normattn.runs.reading import read_object

State = Literal["running", "interrupted", "finished", "diverged"]
FORMAT = 1
_OURS_BEFORE_CONFIG = re.compile(r"\.lock|\.config\.json\..*")
_LEFTOVER = re.compile(r"\.(config\.json|status\.json|environment\.json|step-\d+|model)\..+")
_ABSENT = object()


@dataclass(frozen=True)
class RunStatus:
    """How far a run is: `step` of `steps` done, and one sentence where there is more to say.

    Of a run that diverged, `where` is the module whose output was first not finite, `checkpoint`
    the last good checkpoint.
    """

    state: State
    step: int
    steps: int
    message: str = ""
    where: str = ""
    checkpoint: str | None = None


def read_status(path: Path) -> RunStatus | None:
    """The status of the run in `path`; None when it has not begun."""
    file = path / "status.json"
    if not file.exists():
        return None
    stored = read_object(file)
    try:
        status = RunStatus(**stored)
    except TypeError as error:
        raise InputError(f"{file} is damaged: {error}") from error
    if status.state not in get_args(State):
        raise InputError(f"{file} is damaged: unknown state {status.state!r}")
    return status


class RunDirectory:
    """The directory of one run.

    `RunDirectory.open(path, config, kind)` creates it or comes back to it; a directory that holds
    another configuration, another kind of run, or files that are no run at all is refused with an
    `InputError` and left as it was. Only the holder of `lock()` writes.
    """

    def __init__(self, path: Path, kind: str, config: dict[str, Any]) -> None:
        self.path = path
        self.kind = kind
        self.config = config
        self.metrics = MetricsLog(path / "metrics.jsonl")
        self.checkpoints = Checkpoints(path / "checkpoints")

    @classmethod
    def open(
        cls, path: Path, config: BaseModel, kind: str, changeable: Collection[str] = ()
    ) -> RunDirectory:
        """Create the run in `path`, or reopen it when it holds the same configuration.

        `changeable` names dotted fields that may differ from the stored ones because the results
        do not depend on them; the stored value stays on record.
        """
        path = Path(path)
        wanted = config.model_dump(mode="json")
        file = path / "config.json"
        if file.exists():
            run = cls.existing(path, kind)
            _check_same(run.config, wanted, frozenset(changeable), path)
            return run
        _check_empty(path)
        write_json(file, {"format": FORMAT, "kind": kind, "config": wanted})
        return cls(path, kind, wanted)

    @staticmethod
    def check_place(path: Path) -> None:
        """Raise `InputError` unless `path` is absent or an empty directory, fit for a new run."""
        _check_empty(Path(path))

    @classmethod
    def existing(cls, path: Path, kind: str | None = None) -> RunDirectory:
        """Reopen the run in `path` as it is; `InputError` when there is none of that kind."""
        path = Path(path)
        if not (path / "config.json").is_file():
            raise InputError(f"{path} is not a run directory: it holds no config.json")
        stored = read_object(path / "config.json")
        found, config = stored.get("kind"), stored.get("config")
        if not isinstance(found, str) or not isinstance(config, dict):
            raise InputError(f"{path / 'config.json'} is damaged: expected a kind and a config")
        if kind is not None and found != kind:
            raise InputError(f"{path} holds a run of kind {found!r}, expected {kind!r}")
        if stored.get("format") != FORMAT:
            raise InputError(
                f"{path / 'config.json'} has format {stored.get('format')!r}; this version reads "
                f"format {FORMAT}"
            )
        return cls(path, found, config)

    @property
    def status(self) -> RunStatus | None:
        """The status on disk; None before the run has begun."""
        return read_status(self.path)

    def set_status(self, state: State, step: int, steps: int, message: str = "") -> None:
        """Write `status.json` whole."""
        self.write_status(RunStatus(state, step, steps, message))

    def write_status(self, status: RunStatus) -> None:
        """Write `status.json` whole."""
        write_json(self.path / "status.json", asdict(status))

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Be the only writer; `InputError` when another process is. The kernel frees it at exit."""
        file = self.path / ".lock"
        with explain_os_errors(file):
            handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                holder = os.pread(handle, 32, 0).decode(errors="replace").strip() or "unknown"
                raise InputError(
                    f"the run in {self.path} is in use by process {holder}; wait for it, stop it, "
                    "or choose another directory"
                ) from error
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
            self._check_unchanged()
            self._remove_leftovers()
            yield
        finally:
            os.close(handle)

    def _check_unchanged(self) -> None:
        """Between `open` and `lock` another process may have created a different run here."""
        stored = type(self).existing(self.path, self.kind)
        _check_same(stored.config, self.config, frozenset(), self.path)

    def _remove_leftovers(self) -> None:
        """Drop what a killed writer left beside its target; it was never part of the run."""
        for folder in (self.path, self.path / "checkpoints"):
            if not folder.is_dir():
                continue
            for entry in folder.iterdir():
                if not _LEFTOVER.fullmatch(entry.name):
                    continue
                if entry.is_dir():
                    shutil.rmtree(entry, ignore_errors=True)
                else:
                    entry.unlink(missing_ok=True)


def _check_empty(path: Path) -> None:
    if not path.exists():
        return
    if not path.is_dir():
        raise InputError(f"{path} is a file; expected a new or empty directory for the run")
    foreign = sorted(e.name for e in path.iterdir() if not _OURS_BEFORE_CONFIG.fullmatch(e.name))
    if foreign:
        raise InputError(
            f"{path} holds other files ({', '.join(foreign[:3])}{', …' * (len(foreign) > 3)}) but "
            "no run; choose a new or empty directory"
        )


def _check_same(stored: Any, wanted: Any, changeable: frozenset[str], path: Path) -> None:
    found = first_difference(stored, wanted, changeable)
    if found is not None:
        field, old, new = found
        raise InputError(
            f"the run in {path} has another configuration: {field} is {old} there and {new} here; "
            "choose another directory or the same configuration"
        )


def first_difference(
    stored: Any, wanted: Any, ignored: frozenset[str] = frozenset(), prefix: str = ""
) -> tuple[str, str, str] | None:
    """The first dotted field in which two JSON values differ, with both values as text."""
    if isinstance(stored, dict) and isinstance(wanted, dict):
        for key in [*wanted, *(key for key in stored if key not in wanted)]:
            name = f"{prefix}.{key}" if prefix else key
            if name in ignored:
                continue
            found = first_difference(
                stored.get(key, _ABSENT), wanted.get(key, _ABSENT), ignored, name
            )
            if found is not None:
                return found
        return None
    # In Python, True == 1; in a configuration they differ.
    same = stored == wanted and (type(stored) is bool) == (type(wanted) is bool)
    return None if same else (prefix, _shown(stored), _shown(wanted))


def _shown(value: Any) -> str:
    return "absent" if value is _ABSENT else repr(value)
