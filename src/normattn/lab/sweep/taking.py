"""Models that another study trained with the same settings, taken over instead of trained again."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from normattn.atomic import write_directory
from normattn.errors import InputError
from normattn.lab.runs import RunDirectory, unchanged
from normattn.lab.runs.directory import first_difference
from normattn.lab.sweep.layout import CellPaths
from normattn.lab.sweep.measuring import EVALUATIONS, MODEL
from normattn.lab.sweep.stages import Stage, TrainStage
from normattn.lab.sweep.study import Sweep
from normattn.lab.training.corpus_record import CORPUS_FILE
from normattn.models.pretrained import load_any
from normattn.structured import read_object

LEFT_BEHIND = (EVALUATIONS, "checkpoints", ".*")
"""What was measured there, and what only a training that goes on needs."""


@dataclass(frozen=True)
class Trained:
    """The finished runs in a study's directory by the name of the cell that they serve, and why
    the other cells, which began nothing yet, must be trained.
    """

    folder: Path
    runs: Mapping[str, Path]
    others: Mapping[str, str]

    def lines(self) -> list[str]:
        """What is taken, and what is not and why."""
        said = [f"trained here: {name}, as {why}" for name, why in self.others.items()]
        if self.runs:
            said.insert(0, f"taken over from {self.folder}, trained there: {', '.join(self.runs)}")
        return said


def find(sweep: Sweep, folder: Path) -> Trained:
    """Which cells of `sweep` a study in `folder` has trained, with the very same settings.

    Raises `InputError` where `folder` is no study, and where it serves none of the cells and none
    was begun: then it is not the folder that was meant.
    """
    if not (folder / "cells").is_dir():
        raise InputError(f"--models {folder} is no directory of a study: it holds no cells")
    runs: dict[str, Path] = {}
    others: dict[str, str] = {}
    for cell in sweep.cells:
        here = CellPaths.of(sweep.out, cell.variant, cell.seed).run
        if here.exists():
            continue
        stage = sweep.stages(cell)[0]
        own = CellPaths.of(folder, cell.variant, cell.seed).run
        # Names differ by study: where none is the cell's own, settings tell which run it is.
        candidates = [own] if own.exists() else sorted((folder / "cells").glob("*/seed*"))
        reasons = {run: _unlike(run, stage) for run in candidates}
        alike = [run for run, why in reasons.items() if not why]
        if alike:
            runs[cell.name] = alike[0]
        else:
            others[cell.name] = reasons.get(own, "no run there has its settings")
    if len(others) == len(sweep.cells):
        name, why = next(iter(others.items()))
        raise InputError(f"--models {folder} has no model for this study: {name}: {why}")
    return Trained(folder, runs, others)


def take(sweep: Sweep, models: Trained) -> None:
    """Copy the runs into the sweep, each whole or not at all, without what was measured there.

    Raises `InputError` for a run of another text, and for one that is not as it was left.
    """
    fingerprints: dict[tuple[str, str], Any] = {}
    taken = [cell for cell in sweep.cells if cell.name in models.runs]
    for cell in taken:
        if cell.reads not in fingerprints:
            fingerprints[cell.reads] = getattr(cell.prepare(), "fingerprint", None)
        _refuse_unusable(models.runs[cell.name], fingerprints[cell.reads])
    for cell in taken:
        run = CellPaths.of(sweep.out, cell.variant, cell.seed).run
        write_directory(run, partial(_copy, models.runs[cell.name]))


def _unlike(run: Path, stage: Stage) -> str:
    """Why the run cannot stand for the training of `stage`; "" where it can."""
    if not isinstance(stage, TrainStage):
        return "it trains nothing first"
    if not (run / "config.json").is_file():
        return f"{run} is no run"
    there = RunDirectory.existing(run)
    if there.kind != stage.workload.kind:
        return f"{run} holds a run of kind {there.kind!r}"
    if there.status is None or there.status.state != "finished":
        return f"the run in {run} has not ended in a model"
    wanted, ignored = stage.config.model_dump(mode="json"), frozenset(stage.workload.changeable)
    differs = first_difference(there.config, wanted, ignored)
    if differs is None:
        return ""
    name, old, new = differs
    return f"{name} is {old} there and {new} here"


def _refuse_unusable(run: Path, fingerprint: str | None) -> None:
    record = run / CORPUS_FILE
    if not record.is_file():
        raise InputError(
            f"{record} is gone, or the run never had one: only the models of runs that say their "
            "text can be taken over"
        )
    if read_object(unchanged(record)).get("fingerprint") != fingerprint:
        raise InputError(
            f"the run in {run} was trained on another text: its {CORPUS_FILE} has another "
            "fingerprint than the corpus here; train here, or read with the same packages installed"
        )
    status = RunDirectory.existing(run).status
    for name in status.files if status else ():
        unchanged(run / name)
    load_any(run / MODEL)


def _copy(run: Path, folder: Path) -> None:
    shutil.copytree(run, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(*LEFT_BEHIND))
