"""Collect the measurements of a study's directory, and the corpora of its models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import polars as pl

from normattn.errors import InputError
from normattn.io import read_object, write_json
from normattn.lab.runs import read_metrics
from normattn.lab.stats import Identity, concat, read_measurements, scalar, sums, with_identity
from normattn.lab.stats.arrays import describe_left_out, keep_common_data
from normattn.lab.stats.measurements import FACTOR, Factor, empty
from normattn.lab.sweep.paths import RunPaths
from normattn.lab.sweep.run import canonical_json
from normattn.lab.training.init_from import CORPUS_FILE
from normattn.terminal import warn

BINS = 100
"""The largest number of points in a training's loss curve."""


def collect_measurements(
    out: Path,
    factors: Sequence[str] = (),
    also: Callable[[Identity, Path], pl.DataFrame] = lambda identity, run: empty(),
) -> pl.DataFrame:
    """The stored measurements of a sweep, and the loss curve of each of its trainings.

    Rows with equal `factors` are compared on the most common data set only (`keep_common_data`).
    `also` returns further measurements from the directory of a training.
    """
    runs = RunPaths.below(out)
    refuse_changed_text(paths.run for paths in runs)
    stored = read_measurements(out)
    parts = [keep_common_data(stored, [f"{FACTOR}{name}" for name in factors])]
    for sentence in describe_left_out(stored, parts[0]):
        warn(f"normattn: {sentence}")
    for paths in runs:
        variant, seed = paths.run.parent.name, int(paths.run.name.removeprefix("seed"))
        cell = read_object(paths.settings)
        row, values = cell.get("row") or variant, cell.get("factors") or {}
        known = (cell.get("variant"), cell.get("seed")) == (variant, seed)
        if not (known and isinstance(row, str) and isinstance(values, dict)):
            raise InputError(f"{paths.settings} is damaged: it does not describe {paths.run}")
        identity = training_identity(row, seed, values)
        parts += [history(paths.run, identity), also(identity, paths.run)]
    return concat(parts)


def training_identity(row: str, seed: int, factors: Mapping[str, Factor] | None = None) -> Identity:
    """The identity of measurements of a training itself."""
    return Identity("", row, row, seed, "training", split="train", factors=factors or {})


def history(run: Path, identity: Identity) -> pl.DataFrame:
    """The loss by step of the training in `run`, in at most `BINS` bins; empty before it starts."""
    lines = read_metrics(run / "metrics.jsonl")
    if not lines:
        return empty()
    for line in lines:
        if not isinstance(line.get("loss"), int | float):
            raise InputError(f"{run / 'metrics.jsonl'} is damaged: step {line['step']} has no loss")
    steps, losses = (np.array([line[name] for line in lines], float) for name in ("step", "loss"))
    width = max(1.0, float(steps[-1]) / BINS)
    bins, index = np.unique(((steps - 1) // width).astype(int), return_inverse=True)
    finite = np.isfinite(losses)
    totals = np.bincount(index[finite], losses[finite], minlength=len(bins))
    counts = np.bincount(index[finite], minlength=len(bins))
    rows = pl.concat(
        [
            sums("loss", [""], [[total]], [[count]], axis="step", edges=[start, start + width])
            for start, total, count in zip(bins * width + 1, totals, counts, strict=True)
        ]
    )
    return with_identity(identity, [rows, scalar("steps", float(steps[-1]))])


def write_corpora(folder: Path, out: Path) -> None:
    """Write fingerprints and sources of the data of a study's folder to `out`.

    There is no file if no model has such a record.
    """
    fingerprints: set[str] = set()
    sources: dict[str, str] = {}
    for file in [*folder.glob(f"cells/*/*/{CORPUS_FILE}")] or [*folder.glob(CORPUS_FILE)]:
        stored = read_object(file)
        try:
            fingerprints.update(stored.get("fingerprints") or [stored["fingerprint"]])
            sources |= stored["sources"]
        except (KeyError, TypeError) as error:
            raise InputError(f"{file} is damaged: expected fingerprints and sources") from error
    if fingerprints:
        record = {"fingerprints": sorted(fingerprints), "sources": dict(sorted(sources.items()))}
        write_json(out / CORPUS_FILE, record)


def refuse_changed_text(runs: Iterable[Path], now: Mapping[str, str] | None = None) -> None:
    """Raise `InputError` where two trainings have equal data settings but different data.

    `now` maps settings (`canonical_json`) to the fingerprint of the prepared data.
    """
    seen: dict[str, tuple[object, object]] = {
        settings: ("the corpus now", fingerprint) for settings, fingerprint in (now or {}).items()
    }
    for run in runs:
        if not ((run / CORPUS_FILE).is_file() and (run / "config.json").is_file()):
            continue
        settings = read_object(run / "config.json").get("config")
        data = settings.get("data") if isinstance(settings, dict) else None
        fingerprint = read_object(run / CORPUS_FILE).get("fingerprint")
        first, known = seen.setdefault(canonical_json(data), (run, fingerprint))
        if fingerprint != known:
            raise InputError(
                f"{first} and what {run} was trained on differ, although the settings are the "
                "same: the corpus changed in between; give each text its own directory"
            )
