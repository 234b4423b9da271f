"""What launchers of other hosts share: their settings, and jobs that are known by their files."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import Field

from normattn.errors import InputError
from normattn.lab.sweep.launch.local import visible_gpus
from normattn.lab.sweep.launch.seam import Job, Launcher, Needs, Outcome, Session


class Remote(Launcher):
    """Cells on hosts that a scheduler chooses; all of them see the same folders.

    `cpus` and `gpus` are what each cell asks for (unsaid: its threads; a GPU where the cells'
    `device` is cuda, or where it is auto and this machine has one).
    """

    here: ClassVar[bool] = False

    cpus: int | None = Field(default=None, ge=1)
    gpus: int | None = Field(default=None, ge=0)

    def slots(self, needs: Needs) -> None:
        """The scheduler knows."""

    def cpus_for(self, needs: Needs) -> int:
        """The CPU cores that a cell asks for."""
        return needs.cores if self.cpus is None else self.cpus

    def gpus_for(self, needs: Needs) -> int:
        """The GPUs that a cell asks for."""
        if self.gpus is not None:
            return self.gpus
        sees = needs.device == "auto" and bool(visible_gpus())
        return int(sees or needs.device.startswith("cuda"))

    def said(self) -> str:
        """The settings that differ from their defaults."""
        set_here = self.model_dump(exclude_defaults=True)
        words = ", ".join(f"{name} {value}" for name, value in set_here.items())
        return f"{self.name}: {words}" if words else self.name


def library(name: str, extra: str) -> Any:
    """The module of a launcher's library; `InputError` says which extra brings it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name.partition(".")[0]:
            raise
        raise InputError(
            f"--launcher {extra} needs {name}: pip install 'normattn[{extra}]'"
        ) from None


class Elsewhere(Session):
    """Jobs whose beginning is seen by the log that they open, wherever that happens."""

    poll_seconds: ClassVar[float] = 0.5

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.waiting = list(jobs)
        self.ended: list[Outcome] = []

    def forget_log(self, job: Job) -> None:
        """Drop what an earlier job said, before this one is handed over."""
        job.log.parent.mkdir(parents=True, exist_ok=True)
        job.log.unlink(missing_ok=True)

    def at_work(self, handed_over: Sequence[Job]) -> list[Job]:
        """Those of the jobs that have begun."""
        return [job for job in handed_over if job.log.exists()]
