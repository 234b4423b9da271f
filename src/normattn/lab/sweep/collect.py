"""Everything that was measured below a study's directory, trainings included, as one frame."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from normattn.errors import InputError
from normattn.io import read_object
from normattn.lab.runs import read_metrics
from normattn.lab.stats import Identity, collected, fact, identified, joined, sums
from normattn.lab.stats.arrays import left_out, on_common_sets
from normattn.lab.stats.measurements import FACTOR, Factor, empty
from normattn.lab.sweep.corpora import refuse_changed_text
from normattn.lab.sweep.layout import CellPaths

BINS = 100
"""Points of a training's loss curve, at most."""


def measured_below(out: Path, factors: Sequence[str] = ()) -> pl.DataFrame:
    """The stored measurements of a sweep, and the loss curve of each of its trainings.

    `factors` are the cells' own fields that tell trainings of one row apart. Rows that agree in
    them can be compared only on one set of documents: where a protocol was measured on several of
    one length, the one with the most rows counts.
    """
    apart = [f"{FACTOR}{name}" for name in factors]
    cells = CellPaths.below(out)
    refuse_changed_text(paths.run for paths in cells)
    whole = collected(out)
    parts = [on_common_sets(whole, apart)]
    for sentence in left_out(whole, parts[0]):
        print(f"normattn: {sentence}", file=sys.stderr)
    for paths in cells:
        cell = _cell(paths, factors)
        varied = {name: cell[name] for name in factors}
        parts.append(history(paths.run, cell["row"], cell["seed"], varied))
    return joined(parts)


def _cell(paths: CellPaths, factors: Sequence[str]) -> dict[str, Any]:
    """The settings of a cell; `InputError` where they are not those of the cell in its place."""
    cell = read_object(paths.settings)
    wanted = {"variant": paths.run.parent.name, "seed": int(paths.run.name.removeprefix("seed"))}
    for name, value in wanted.items():
        if cell.get(name) != value or type(cell[name]) is not type(value):
            raise InputError(
                f"{paths.settings} is damaged: {name} is {cell.get(name)!r:.40} there, and its "
                f"place is that of {value!r}"
            )
    said = {"row": cell["variant"], **cell}
    for name in ("row", *factors):
        if type(said.get(name)) not in (str, int, float):
            raise InputError(f"{paths.settings} is damaged: {name} is {said.get(name)!r:.40}")
    return said


def history(
    run: Path, row: str, seed: int, factors: Mapping[str, Factor] | None = None
) -> pl.DataFrame:
    """The loss by step of the training in `run`, in at most `BINS` bins; empty before it began."""
    lines = read_metrics(run / "metrics.jsonl")
    if not lines:
        return empty()
    steps = np.array([line["step"] for line in lines], float)
    losses = np.array([_loss(line, run) for line in lines])
    width = max(1.0, float(steps[-1]) / BINS)
    bins = ((steps - 1) // width).astype(int)
    used, where = np.unique(bins, return_inverse=True)
    finite = np.isfinite(losses)
    above = np.bincount(where[finite], losses[finite], minlength=len(used))
    below = np.bincount(where[finite], minlength=len(used))
    identity = Identity(
        study="",
        row=row,
        score=row,
        seed=seed,
        protocol="training",
        split="train",
        factors=factors or {},
    )
    starts = used * width + 1
    rows = pl.concat(
        [
            sums("loss", [""], [[a]], [[b]], axis="step", edges=[start, start + width])
            for start, a, b in zip(starts, above, below, strict=True)
        ]
    )
    return identified(identity, [rows, fact("steps", float(steps[-1]))])


def _loss(line: Mapping[str, Any], run: Path) -> float:
    loss = line.get("loss")
    if not isinstance(loss, int | float):
        raise InputError(f"{run / 'metrics.jsonl'} is damaged: step {line['step']} has no loss")
    return float(loss)
