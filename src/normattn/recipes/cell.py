"""One cell in its own process: each of its stages in turn, and only what is not yet done."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from normattn.errors import InputError
from normattn.locks import InUseError, locked
from normattn.recipes.continued import ContinueCell
from normattn.recipes.jobs import DIVERGED, FINISHED, watch_parent
from normattn.recipes.language_studies import ReadCell
from normattn.recipes.layout import CellPaths, note_progress, write_if_changed
from normattn.recipes.mechanism import MechanismCell
from normattn.recipes.realformer import EncoderCell, GridCell
from normattn.recipes.rmsnorm import NormCell, TimeCell
from normattn.recipes.settings import validated
from normattn.recipes.stages import Note
from normattn.recipes.studies import Cell
from normattn.recipes.translation import LadderCell, TranslateCell
from normattn.recipes.vision import VisionCell
from normattn.structured import read_object

PROGRESS_SECONDS = 0.5
LOCK_SECONDS = 120.0

KINDS: dict[str, type[Cell]] = {
    "read": ReadCell,
    "continue": ContinueCell,
    "mechanism": MechanismCell,
    "realformer": EncoderCell,
    "realformer-grid": GridCell,
    "translate": TranslateCell,
    "ladder": LadderCell,
    "vision": VisionCell,
    "rmsnorm": NormCell,
    "rmsnorm-time": TimeCell,
}
"""What a cell.json may describe, by its `kind`."""


def run_cell(job: Path, parent: int = 0) -> int:
    """Do what `job`/cell.json says and is not yet done; return the exit code (0, or 3: diverged).

    `parent` is the process without which this one is to stop (0: none). Stopped,
    training leaves a checkpoint, and evaluations are whole or absent.
    """
    if parent:
        watch_parent(parent)
    paths = CellPaths.of_job(job)
    cell = read_cell(paths.settings)
    with _only_one(paths.lock):
        data = cell.prepare()
        for number, stage in enumerate(cell.stages(paths)):
            diverged = stage.run(data, _noting(paths.progress, number, stage.phase))
            if diverged is not None:
                print(f"normattn: {diverged}", file=sys.stderr)
                return DIVERGED
        write_if_changed(paths.done, cell.model_dump(mode="json"))
    return FINISHED


def read_cell(settings: Path) -> Cell:
    """The cell that a cell.json describes."""
    fields = read_object(settings)
    kind = KINDS.get(str(fields.get("kind")))
    if kind is None:
        raise InputError(f"{settings} describes no cell that this version knows")
    return validated(kind, fields, str(settings))


def _noting(path: Path, stage: int, phase: str) -> Note:
    """Leaves a note of how far a stage is, twice a second at most."""
    due = 0.0

    def note(done: int, total: int, text: str) -> None:
        nonlocal due
        if time.monotonic() >= due or done == total:
            due = time.monotonic() + PROGRESS_SECONDS
            facts = {"stage": stage, "phase": phase, "done": done, "total": total, "text": text}
            note_progress(path, facts)

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
