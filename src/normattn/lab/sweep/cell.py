"""One cell in its own process: each of its stages in turn, and only what is not yet done."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from normattn.errors import DivergedError, InputError
from normattn.io import read_object
from normattn.lab.runs.environment import keep_pages
from normattn.lab.stats import measurements
from normattn.lab.sweep.launchers import DIVERGED, FINISHED
from normattn.lab.sweep.layout import CellPaths, note_progress, write_if_changed
from normattn.lab.sweep.stages import Note
from normattn.lab.sweep.study import Cell, Study, diverged
from normattn.locks import InUseError, locked
from normattn.stopping import stop_with_parent
from normattn.terminal import warn

PROGRESS_SECONDS = 0.5
LOCK_SECONDS = 120.0


def run_cell(job: Path, study: Study, parent: int = 0) -> int:
    """Do what `job`/cell.json says and is not yet done; return the exit code (0, or 3: diverged).

    The file must be of `study`. `parent` is the process without which this one is to stop (0:
    none). Stopped, training leaves a checkpoint, and evaluations are whole or absent.
    """
    if parent:
        stop_with_parent(parent)
    paths = CellPaths.of_job(job)
    cell = read_cell(paths.settings, study)
    with keep_pages(), _only_one(paths.lock):
        data = cell.prepare()
        for number, stage in enumerate(cell.stages(paths)):
            try:
                stage.run(data, _noting(paths.progress, number, stage.phase))
            except DivergedError as error:
                measurements.write(paths.diverged, diverged(cell, error.step, error.where))
                warn(f"normattn: {error}")
                return DIVERGED
        write_if_changed(paths.done, cell.model_dump(mode="json"))
    return FINISHED


def write_cell(settings: Path, study: Study, cell: Cell) -> None:
    """Write the cell.json that `read_cell` reads.

    It holds the study's name and never a path: what is read from a file must not choose code.
    """
    write_if_changed(settings, {"study": study.name, **cell.model_dump(mode="json")})


def read_cell(settings: Path, study: Study) -> Cell:
    """The cell that a cell.json describes; `InputError` where it names another study."""
    named = study_named(settings)
    if named != study.name:
        raise InputError(f"{settings} is of the study {named!r:.100}, not of {study.name}")
    fields = {name: value for name, value in read_object(settings).items() if name != "study"}
    return study.cell(fields, str(settings))


def study_named(settings: Path) -> str:
    """The name of the study that a cell.json says it is of; it may be no study's."""
    named = read_object(settings).get("study")
    if not isinstance(named, str):
        raise InputError(f"{settings} names no study")
    return named


def child_arguments(command: str, job: Path, study: Study) -> tuple[str, ...]:
    """What Python is told to run the hidden `command` on `job`; a user's study file comes along."""
    file = ("--study", str(study.source.resolve())) if study.source else ("--study", study.name)
    return ("-m", "normattn", command, *file, str(job))


def _noting(path: Path, stage: int, phase: str) -> Note:
    """Leaves a note of how far a stage is, twice a second at most."""
    due = 0.0

    def note(done: int, total: int, text: str) -> None:
        nonlocal due
        if time.monotonic() >= due or done == total:
            due = time.monotonic() + PROGRESS_SECONDS
            facts = {"stage": stage, "phase": phase, "done": done, "total": total, "text": text}
            note_progress(path, {**facts, "host": platform.node()})

    return note


@contextmanager
def _only_one(lock: Path) -> Iterator[None]:
    """Be the only one here; an orphan of a killed parent first saves its state and goes."""
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(lock, LOCK_SECONDS))
        except InUseError as error:
            raise InputError(
                f"process {error.holder} has worked on {lock.parent} for "
                f"{LOCK_SECONDS:.0f} s; stop it first"
            ) from error
        yield
