"""One cell in its own process: train, then read on in every way; each step only if not yet done."""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from normattn.data import TokenData, prepare_tokens
from normattn.errors import DivergedError, InputError, Interrupted
from normattn.recipes.jobs import DIVERGED, FINISHED, watch_parent
from normattn.recipes.keynorm import AS_IS, CellConfig
from normattn.recipes.layout import CellPaths, note_progress, write_if_changed
from normattn.recipes.measuring import count_evaluations, evaluate_trained
from normattn.recipes.settings import validated
from normattn.runs import read_status
from normattn.runs.reading import read_object
from normattn.training import StepReport, TrainingConfig, train_causal

PROGRESS_SECONDS = 0.5
LOCK_SECONDS = 120.0


def run_cell(job: Path, parent: int = 0) -> int:
    """Do what `job`/cell.json says and is not yet done; return the exit code (0, or 3: diverged).

    `parent` is the process without which this one is to stop (0: none). Raises `Interrupted` when
    stopped; training then left a checkpoint, and evaluations are whole or absent.
    """
    if parent:
        watch_parent(parent)
    paths = CellPaths.of_job(job)
    cell = validated(CellConfig, read_object(paths.settings), str(paths.settings))
    with _raise_when_stopped(), _only_one(paths.lock):
        config = cell.training_config
        if _diverged_before(paths.run):
            return DIVERGED
        data = prepare_tokens(config.data)
        progress = _Progress(paths.progress)
        try:
            train_causal(config, paths.run, on_step=progress.step, show_progress=False)
        except DivergedError as error:
            print(f"normattn: {error}", file=sys.stderr)
            return DIVERGED
        _evaluate(cell, config, data, paths, progress)
        write_if_changed(paths.done, cell.model_dump(mode="json"))
    return FINISHED


def _evaluate(
    cell: CellConfig,
    config: TrainingConfig,
    data: TokenData,
    paths: CellPaths,
    progress: _Progress,
) -> None:
    total = count_evaluations(cell.evaluation) * len(cell.methods)
    evaluate_trained(
        paths.run,
        config,
        data,
        methods=["" if method == AS_IS else method for method in cell.methods],
        settings=cell.evaluation,
        name=f"{cell.variant}/seed{cell.seed}",
        on_done=lambda done: progress.evaluated(done, total),
    )


def _diverged_before(run: Path) -> bool:
    """Whether the run ended in NaN: that is its result, and training again would give the same."""
    status = read_status(run)
    if status is None or status.state != "diverged":
        return False
    print(f"normattn: {status.message}", file=sys.stderr)
    return True


class _Progress:
    """Leaves a note of how far the cell is, twice a second at most."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._due = 0.0

    def step(self, report: StepReport) -> None:
        """A training step is done."""
        if time.monotonic() >= self._due or report.step == report.steps:
            self._note(
                "training",
                report.step,
                report.steps,
                f"loss {report.loss:.3f}, {report.tokens_per_second:,.0f} tokens/s",
            )

    def evaluated(self, done: int, total: int) -> None:
        """An evaluation is done."""
        self._note("evaluation", done, total, "")

    def _note(self, phase: str, done: int, total: int, text: str) -> None:
        self._due = time.monotonic() + PROGRESS_SECONDS
        note_progress(self._path, {"phase": phase, "done": done, "total": total, "text": text})


@contextmanager
def _raise_when_stopped() -> Iterator[None]:
    """Turn SIGTERM and SIGINT into `Interrupted`; while it trains, the loop's own handler acts."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Interrupted(f"stopped by {signal.Signals(number).name}; the same command goes on")

    before = {kind: signal.signal(kind, stop) for kind in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


@contextmanager
def _only_one(lock: Path) -> Iterator[None]:
    """Be the only one here; an orphan of a killed parent first saves its state and goes."""
    handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
    deadline = time.monotonic() + LOCK_SECONDS
    try:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise InputError(
                        f"another process has worked on {lock.parent} for "
                        f"{LOCK_SECONDS:.0f} s; stop it first"
                    ) from error
                time.sleep(0.1)
        yield
    finally:
        os.close(handle)
