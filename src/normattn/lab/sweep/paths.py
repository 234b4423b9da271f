"""Every path below the output directory of a sweep."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from normattn.errors import InputError
from normattn.io import read_object


@dataclass(frozen=True)
class RunPaths:
    """The paths of one run.

    - `run`: the directory of its results. `continued`: trainings that continue from `run`.
    - `job`: the directory of its child process, separate because a run directory accepts only files
      of a training. It holds `settings` (what the child does), `diverged` (the measurement that the
      training ended in NaN), `log` (the child's output), `progress`, and the `lock` that a running
      child holds.
    """

    run: Path
    continued: Path
    job: Path
    settings: Path
    diverged: Path
    log: Path
    progress: Path
    lock: Path

    @classmethod
    def of(cls, out: Path, variant: str, seed: int) -> RunPaths:
        """The paths of the run (variant, seed) below `out`."""
        name = Path(variant) / f"seed{seed}"
        job = out / "jobs" / name
        files = ("cell.json", "diverged.parquet", "log.txt", "progress.json", ".lock")
        return cls(out / "cells" / name, out / "continued" / name, job, *(job / n for n in files))

    @classmethod
    def of_job(cls, job: Path) -> RunPaths:
        """The paths of the run with this `job` directory; `InputError` for another directory."""
        job = job.resolve()
        seed = job.name.removeprefix("seed")
        if not seed.isdecimal() or len(job.parents) < 3:
            raise InputError(f"{job} is no directory of a run: expected jobs/VARIANT/seedN")
        return cls.of(job.parents[2], job.parent.name, int(seed))

    @classmethod
    def below(cls, out: Path) -> list[RunPaths]:
        """The paths of all started runs below `out`; `InputError` for one without settings."""
        jobs = {settings.parent for settings in out.glob("jobs/*/*/cell.json")}
        for run in sorted(out.glob("cells/*/seed*")):
            job = out / "jobs" / run.relative_to(out / "cells")
            if job not in jobs:
                raise InputError(
                    f"{job / 'cell.json'} is missing, and it described {run}: restore it, or "
                    "remove that directory to train it again"
                )
        return [cls.of_job(job) for job in sorted(jobs)]


def belongs_to_study(run: Path) -> bool:
    """Whether a run is in a study's directory, so that the study reports its measurements."""
    names = ("config.json", "cells", "jobs")
    return any(all((folder / n).exists() for n in names) for folder in run.resolve().parents)


def write_progress(path: Path, value: dict[str, Any]) -> None:
    """Write `value` for a polling reader, atomically but without fsync."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(value), "utf-8")
    temporary.replace(path)


def read_or_empty(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty where it is missing or damaged."""
    try:
        return read_object(path)
    except InputError:
        return {}
