"""Everything that was measured below a study's directory, trainings included, as one frame."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from normattn.errors import InputError
from normattn.files import open_file
from normattn.measure import Identity, collected, fact, identified, joined, sums
from normattn.measure.frame import FACTOR, Factor
from normattn.measure.gather import on_common_sets
from normattn.structured import json_lines, parse_json, read_object
from normattn.sweep.layout import CellPaths

BINS = 100
"""Points of a training's loss curve, at most."""


def measured_below(out: Path, factors: Sequence[str] = ()) -> pl.DataFrame:
    """The stored measurements of a sweep, and the loss curve of each of its trainings.

    `factors` are the cells' own fields that tell trainings of one row apart. Rows that agree in
    them can be compared only on one set of documents: where a protocol was measured on several of
    one length, the one with the most rows counts.
    """
    apart = [f"{FACTOR}{name}" for name in factors]
    parts = [on_common_sets(collected(out), apart)]
    for settings in sorted(out.glob("jobs/*/*/cell.json")):
        paths = CellPaths.of_job(settings.parent)
        cell = read_object(settings)
        metrics = paths.run / "metrics.jsonl"
        if metrics.exists():
            row = str(cell.get("row", cell["variant"]))
            varied = {name: cell[name] for name in factors}
            parts.append(history(metrics, row, int(cell["seed"]), varied))
    return joined(parts)


def history(
    metrics: Path, row: str, seed: int, factors: Mapping[str, Factor] | None = None
) -> pl.DataFrame:
    """The loss by step of a training, in at most `BINS` bins, from its metrics file."""
    steps, losses = read_losses(metrics)
    if not len(steps):
        return pl.DataFrame()
    width = max(1.0, float(steps[-1]) / BINS)
    place = ((steps - 1) // width).astype(int)
    used, where = np.unique(place, return_inverse=True)
    finite = np.isfinite(losses)
    above = np.bincount(where[finite], losses[finite], minlength=len(used))
    below = np.bincount(where[finite], minlength=len(used))
    identity = Identity(
        study="",
        row=row,
        score=row,
        seed=seed,
        protocol="training",
        length=0,
        train_length=0,
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


def read_losses(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Steps and losses of a metrics.jsonl file; a half-written last line is left out.

    Raises `InputError` for a file that is damaged or cannot be read.
    """
    points = []
    with open_file(path) as file:
        for number, line in json_lines(file, lambda n: f"{path}, line {n},"):
            value = _metrics_line(line)
            # A last line that is being written has no end yet.
            if value is None and line.endswith(b"\n"):
                raise InputError(f"{path} is damaged: line {number} is not a JSON object")
            if value is not None and isinstance(value.get("loss"), int | float):
                points.append((float(value["step"]), float(value["loss"])))
    steps, losses = zip(*points, strict=True) if points else ((), ())
    return np.asarray(steps), np.asarray(losses)


def _metrics_line(line: bytes) -> dict[str, Any] | None:
    try:
        value = parse_json(line, "a metrics line")
    except InputError:
        return None
    return value if isinstance(value, dict) and type(value.get("step")) is int else None
