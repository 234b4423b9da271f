"""Run directories: one configuration, one writer, and a status that other processes may read.

Layout: `config.json` (kind and full configuration), `status.json`, `metrics.jsonl`,
`environment.json`, `checkpoints/`, `.lock`, and files of the kind of run.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from normattn.errors import InputError
from normattn.io import read_object, sha256_of, write_json
from normattn.lab.runs.checkpoints import Checkpoints
from normattn.lab.runs.metrics import MetricsLog
from normattn.lab.runs.status import RunStatus, State, read_status
from normattn.locks import InUseError, locked
from normattn.settings import differences

FORMAT = 1
_NOT_HASHED = {"config.json", "status.json", "environment.json", "timing.jsonl"}
"""Files that are checked otherwise, may change, or differ between equal runs."""
_BEFORE_CONFIG = re.compile(r"\.lock|\.config\.json\..*")
# Temporary files of a killed writer.
_LEFTOVER = re.compile(r"\.(config\.json|status\.json|environment\.json|step-\d+|model)\..+")


class RunDirectory:
    """The directory of a run.

    `RunDirectory.open(path, config, kind)` reads only. `lock()` creates or resumes the run, and
    only its holder writes. Only `put` changes a stored configuration. Both raise `InputError`, and
    change nothing, if the directory has another configuration or kind of run, or other files.
    """

    def __init__(
        self, path: Path, kind: str, config: dict[str, Any], changeable: Collection[str] = ()
    ) -> None:
        self.path = path
        self.kind = kind
        self.config = config
        self.metrics = MetricsLog(path / "metrics.jsonl")
        self.checkpoints = Checkpoints(path / "checkpoints")
        self._changeable = changeable

    @classmethod
    def open(
        cls, path: Path, config: BaseModel, kind: str, changeable: Collection[str] = ()
    ) -> RunDirectory:
        """Return the run of this configuration in `path`, existing or new. Writes nothing.

        Dotted fields in `changeable` may differ from the stored ones; the stored values stay.
        """
        run = cls(Path(path), kind, config.model_dump(mode="json"), changeable)
        run._load_stored()
        return run

    @classmethod
    def existing(cls, path: Path, kind: str | None = None) -> RunDirectory:
        """Open the existing run in `path`; `InputError` if there is none of that kind."""
        path = Path(path)
        file = path / "config.json"
        if not file.is_file():
            raise InputError(f"{path} is not a run directory: it holds no config.json")
        stored = read_object(file)
        if "model_type" in stored:
            raise InputError(f"{path} is not a run directory: it holds a model of transformers")
        stored_kind, config = stored.get("kind"), stored.get("config")
        if not isinstance(stored_kind, str) or not isinstance(config, dict):
            raise InputError(f"{file} is damaged: expected a kind and a config")
        if kind is not None and stored_kind != kind:
            raise InputError(f"{path} holds a run of kind {stored_kind!r}, expected {kind!r}")
        if stored.get("format") != FORMAT:
            raise InputError(f"{file} has format {stored.get('format')!r}; expected {FORMAT}")
        return cls(path, stored_kind, config)

    @property
    def exists(self) -> bool:
        """Whether the configuration is on disk."""
        return (self.path / "config.json").exists()

    @property
    def status(self) -> RunStatus | None:
        """The status on disk; None before the run has started."""
        return read_status(self.path)

    def set_status(
        self, state: State, step: int, steps: int, message: str = "", **details: Any
    ) -> None:
        """Write `status.json`, at the end with the files' digests; `details` are other fields."""
        files = {}
        if state in ("finished", "diverged"):
            files = {
                file.name: sha256_of(file)
                for file in sorted(self.path.iterdir())
                if file.is_file() and file.name[0] != "." and file.name not in _NOT_HASHED
            }
        status = RunStatus(
            state=state, step=step, steps=steps, message=message, files=files, **details
        )
        write_json(self.path / "status.json", status.model_dump())

    def put(self, name: str, value: Any) -> None:
        """Change a field of the configuration on disk that does not affect results."""
        self.config = {**self.config, name: value}
        self._write_config()

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the directory for writing, with this run's configuration on disk.

        Raises `InputError` if another process holds the lock, or another run was started here since
        `open`. The lock ends with the process, even if it is killed.
        """
        # Check first, so that a wrong run does not lock out the right one.
        self._load_stored()
        with ExitStack() as stack:
            try:
                stack.enter_context(locked(self.path / ".lock", seconds=0.0))
            except InUseError as error:
                raise InputError(
                    f"the run in {self.path} is in use by process {error.holder}; wait for it, "
                    "stop it, or choose another directory"
                ) from error
            if not self._load_stored():
                self._write_config()
            for folder in (self.path, self.path / "checkpoints"):
                for entry in list(folder.iterdir()) if folder.is_dir() else []:
                    if _LEFTOVER.fullmatch(entry.name) and entry.is_dir():
                        shutil.rmtree(entry, ignore_errors=True)
                    elif _LEFTOVER.fullmatch(entry.name):
                        entry.unlink(missing_ok=True)
            yield

    def _write_config(self) -> None:
        stored = {"format": FORMAT, "kind": self.kind, "config": self.config}
        write_json(self.path / "config.json", stored)

    def _load_stored(self) -> bool:
        """Load the configuration on disk, which must match; return False if there is none."""
        if not self.exists:
            if self.path.exists() and not self.path.is_dir():
                raise InputError(f"{self.path} is a file; expected a new or empty directory")
            entries = self.path.iterdir() if self.path.exists() else ()
            foreign = sorted(e.name for e in entries if not _BEFORE_CONFIG.fullmatch(e.name))
            if foreign and not self.exists:  # Another process may have started the run meanwhile.
                raise InputError(
                    f"{self.path} holds other files ({_first_names(foreign)}) but no run; choose a "
                    "new or empty directory"
                )
            if not self.exists:
                return False
        stored = type(self).existing(self.path, self.kind)
        differing = list(differences(stored.config, self.config, frozenset(self._changeable)))
        if differing:
            (field, old, new), *others = differing
            names = _first_names([name for name, *_ in others])
            more = f" ({len(others)} more differ: {names})" if others else ""
            raise InputError(
                f"the run in {self.path} has another configuration: {field} is {old} there and "
                f"{new} here{more}; choose another directory or the same configuration"
            )
        self.config = stored.config
        return True


def _first_names(names: Sequence[str]) -> str:
    return ", ".join([*names[:3], *(["…"] if len(names) > 3 else [])])
