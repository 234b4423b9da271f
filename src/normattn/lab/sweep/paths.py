"""Every path below the output directory of a sweep."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from normattn.errors import InputError
from normattn.io import read_object, write_json


@dataclass(frozen=True)
class RunPaths:
    """The places of one run: `run` holds its results, `job` what steers and describes its child.

    They are apart because a run directory refuses files that are no part of a training.
    `continued` holds the trainings that go on from `run`. In `job`: `settings` (what the child is
    to do), `done` (a copy of them, written when all was done), `diverged` (the measurement that the
    training ended in NaN), `log` (what the child said), `progress`, and the `lock` that the child
    at work holds.
    """

    run: Path
    continued: Path
    job: Path
    settings: Path
    done: Path
    diverged: Path
    log: Path
    progress: Path
    lock: Path

    @classmethod
    def of(cls, out: Path, variant: str, seed: int) -> RunPaths:
        """The places of the run (variant, seed) below `out`."""
        own = Path(variant) / f"seed{seed}"
        job = out / "jobs" / own
        files = ("cell.json", "done.json", "diverged.parquet", "log.txt", "progress.json", ".lock")
        return cls(out / "cells" / own, out / "continued" / own, job, *(job / n for n in files))

    @classmethod
    def of_job(cls, job: Path) -> RunPaths:
        """The places of the run that `job` steers."""
        job = job.resolve()
        return cls.of(job.parents[2], job.parent.name, int(job.name.removeprefix("seed")))

    @classmethod
    def below(cls, out: Path) -> list[RunPaths]:
        """The places of every run below `out` that was begun, in a fixed order.

        Raises `InputError` where the settings of one that has results are gone.
        """
        jobs = {settings.parent for settings in out.glob("jobs/*/*/cell.json")}
        for run in sorted(out.glob("cells/*/seed*")):
            job = out / "jobs" / run.relative_to(out / "cells")
            if job not in jobs:
                raise InputError(
                    f"{job / 'cell.json'} is missing, and it described {run}: restore it, or "
                    "remove that directory to train it again"
                )
        return [cls.of_job(job) for job in sorted(jobs)]


def is_of_a_study(run: Path) -> bool:
    """Whether a run lies in a study's directory, so that its records are on the study's page."""
    names = ("config.json", "cells", "jobs")
    return any(all((folder / n).exists() for n in names) for folder in run.resolve().parents)


def write_if_changed(path: Path, value: dict[str, Any]) -> None:
    """Write `value` as JSON unless the file is complete already."""
    if peek(path) != value:
        write_json(path, value)


def note_progress(path: Path, value: dict[str, Any]) -> None:
    """Write `value` for a reader that polls: renamed into place, without waiting for the disk."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(value), "utf-8")
    temporary.replace(path)


def peek(path: Path) -> dict[str, Any]:
    """The object in a small file that can be written again; empty where there is none whole."""
    try:
        return read_object(path)
    except InputError:
        return {}
