"""A run directory: one configuration, one writer, and a status that other processes may read.

Layout: `config.json` (kind and the whole resolved configuration), `status.json`, `metrics.jsonl`,
`environment.json`, `checkpoints/`, `.lock`, and whatever the kind of run adds.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from normattn.errors import InputError
from normattn.io import read_object, write_json
from normattn.lab.runs.checkpoints import Checkpoints
from normattn.lab.runs.metrics import MetricsLog
from normattn.lab.runs.status import RunStatus, State, digests_of_files, read_status
from normattn.locks import InUseError, locked
from normattn.settings import differences

FORMAT = 1
_OURS_BEFORE_CONFIG = re.compile(r"\.lock|\.config\.json\..*")
_LEFTOVER = re.compile(r"\.(config\.json|status\.json|environment\.json|step-\d+|model)\..+")


class RunDirectory:
    """The directory of one run.

    `RunDirectory.open(path, config, kind)` looks at the place and writes nothing; `lock()` makes
    the run there, or resumes it. A directory that holds another configuration, another kind
    of run, or files that are no run at all is refused by both with an `InputError` and left as it
    was. Only the holder of `lock()` writes, the configuration included, and the configuration is
    written once: the holder's is the one on disk.
    """

    def __init__(
        self,
        path: Path,
        kind: str,
        config: dict[str, Any],
        changeable: frozenset[str] = frozenset(),
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
        """The run of this configuration that `path` holds or may hold; nothing is written.

        `changeable` names dotted fields that may differ from the stored ones because the results
        do not depend on them; the stored value stays on record.
        """
        run = cls(Path(path), kind, config.model_dump(mode="json"), frozenset(changeable))
        run._take_stored()
        return run

    @classmethod
    def existing(cls, path: Path, kind: str | None = None) -> RunDirectory:
        """Reopen the run in `path` unchanged; `InputError` when there is none of that kind."""
        path = Path(path)
        file = path / "config.json"
        if not file.is_file():
            raise InputError(f"{path} is not a run directory: it holds no config.json")
        stored = read_object(file)
        stored_kind, config = stored.get("kind"), stored.get("config")
        if not isinstance(stored_kind, str) or not isinstance(config, dict):
            raise InputError(f"{file} is damaged: expected a kind and a config")
        if kind is not None and stored_kind != kind:
            raise InputError(f"{path} holds a run of kind {stored_kind!r}, expected {kind!r}")
        if stored.get("format") != FORMAT:
            raise InputError(
                f"{file} has format {stored.get('format')!r}; this version reads format {FORMAT}"
            )
        return cls(path, stored_kind, config)

    @property
    def begun(self) -> bool:
        """Whether the configuration is on disk."""
        return (self.path / "config.json").exists()

    @property
    def status(self) -> RunStatus | None:
        """The status on disk; None before the run has begun."""
        return read_status(self.path)

    def set_status(
        self, state: State, step: int, steps: int, message: str = "", **more: Any
    ) -> None:
        """Write `status.json` whole; of a run that has ended, with the digests of its files.

        `more` are the other fields of `RunStatus`.
        """
        ended = state in ("finished", "diverged")
        files = digests_of_files(self.path) if ended else {}
        status = RunStatus(state, step, steps, message, files=files, **more)
        write_json(self.path / "status.json", asdict(status))

    def put(self, name: str, value: Any) -> None:
        """Change one field of the configuration on disk, on which no result depends."""
        self.config = {**self.config, name: value}
        self._write_config()

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Be the only writer, with this run's configuration on disk.

        `InputError` when another process is, or another run came to be here since `open`. The
        lock ends with the process, however that dies.
        """
        # Looked at before the lock is taken: who will be refused must not keep others out.
        self._take_stored()
        with ExitStack() as stack:
            try:
                stack.enter_context(locked(self.path / ".lock", seconds=0.0))
            except InUseError as error:
                raise InputError(
                    f"the run in {self.path} is in use by process {error.holder}; wait for it, "
                    "stop it, or choose another directory"
                ) from error
            if not self._take_stored():
                self._write_config()
            self._remove_leftovers()
            yield

    def _write_config(self) -> None:
        stored = {"format": FORMAT, "kind": self.kind, "config": self.config}
        write_json(self.path / "config.json", stored)

    def _take_stored(self) -> bool:
        """Take the configuration on disk if it is this one; False where there is none yet."""
        if not self.begun:
            _refuse_foreign(self.path)
            if not self.begun:
                return False
        stored = type(self).existing(self.path, self.kind)
        differing = list(differences(stored.config, self.config, self._changeable))
        if differing:
            (field, old, new), *others = differing
            more = f" ({len(others)} more differ: {_named([n for n, *_ in others])})" * bool(others)
            raise InputError(
                f"the run in {self.path} has another configuration: {field} is {old} there and "
                f"{new} here{more}; choose another directory or the same configuration"
            )
        self.config = stored.config
        return True

    def _remove_leftovers(self) -> None:
        """Drop the temporary files of a killed writer: it was never part of the run."""
        for folder in (self.path, self.path / "checkpoints"):
            entries = list(folder.iterdir()) if folder.is_dir() else []
            for entry in (entry for entry in entries if _LEFTOVER.fullmatch(entry.name)):
                if entry.is_dir():
                    shutil.rmtree(entry, ignore_errors=True)
                else:
                    entry.unlink(missing_ok=True)


def _refuse_foreign(path: Path) -> None:
    """Raise `InputError` for a place that holds something and no run."""
    if not path.exists():
        return
    if not path.is_dir():
        raise InputError(f"{path} is a file; expected a new or empty directory for the run")
    foreign = sorted(e.name for e in path.iterdir() if not _OURS_BEFORE_CONFIG.fullmatch(e.name))
    # Whoever began the run meanwhile put more there than the configuration.
    if foreign and not (path / "config.json").exists():
        raise InputError(
            f"{path} holds other files ({_named(foreign)}) but no run; choose a new or empty "
            "directory"
        )


def _named(names: Sequence[str]) -> str:
    return ", ".join([*names[:3], *(["…"] if len(names) > 3 else [])])
