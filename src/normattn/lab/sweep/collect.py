"""Everything that was measured below a study's directory, and the text that its models read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import polars as pl

from normattn.errors import InputError
from normattn.io import read_object, write_json
from normattn.lab.runs import read_metrics
from normattn.lab.stats import Identity, collected, fact, identified, joined, sums
from normattn.lab.stats.arrays import left_out, on_common_sets
from normattn.lab.stats.measurements import FACTOR, Factor, empty
from normattn.lab.sweep.paths import RunPaths
from normattn.lab.sweep.run import canonical_json
from normattn.lab.training.init_from import CORPUS_FILE
from normattn.terminal import warn

BINS = 100
"""Points of a training's loss curve, at most."""


def measured_below(
    out: Path,
    factors: Sequence[str] = (),
    also: Callable[[Identity, Path], pl.DataFrame] = lambda whose, run: empty(),
) -> pl.DataFrame:
    """The stored measurements of a sweep, and the loss curve of each of its trainings.

    `factors` are those of the runs that distinguish trainings of one row. Rows that agree in them
    can be compared only on one set of documents: where a protocol was measured on several of one
    length, the one with the most rows counts. `also` returns what else a training wrote into its
    directory.
    """
    runs = RunPaths.below(out)
    refuse_changed_text(paths.run for paths in runs)
    whole = collected(out)
    parts = [on_common_sets(whole, [f"{FACTOR}{name}" for name in factors])]
    for sentence in left_out(whole, parts[0]):
        warn(f"normattn: {sentence}")
    for paths in runs:
        whose = _training_of(paths)
        parts += [history(paths.run, whose), also(whose, paths.run)]
    return joined(parts)


def _training_of(paths: RunPaths) -> Identity:
    """Whose the training of a run is: its row, seed and factors, as its settings say them.

    Raises `InputError` where they are not those of the run in its place.
    """
    stored, damaged = read_object(paths.settings), f"{paths.settings} is damaged"
    wanted = {"variant": paths.run.parent.name, "seed": int(paths.run.name.removeprefix("seed"))}
    for name, value in wanted.items():
        if stored.get(name) != value or type(stored[name]) is not type(value):
            raise InputError(
                f"{damaged}: {name} is {stored.get(name)!r:.40} there, and its place is that of "
                f"{value!r}"
            )
    row, factors = stored.get("row") or stored["variant"], stored.get("factors") or {}
    values = factors.values() if isinstance(factors, dict) else [None]
    if not isinstance(row, str) or not all(isinstance(v, str | int | float) for v in values):
        raise InputError(f"{damaged}: its row or its factors are not plain values")
    return trained(row, stored["seed"], factors)


def trained(row: str, seed: int, factors: Mapping[str, Factor] | None = None) -> Identity:
    """Whose the measurements of a training itself are."""
    return Identity("", row, row, seed, "training", split="train", factors=factors or {})


def history(run: Path, whose: Identity) -> pl.DataFrame:
    """The loss by step of the training in `run`, in at most `BINS` bins; empty before it began."""
    lines = read_metrics(run / "metrics.jsonl")
    if not lines:
        return empty()
    for line in lines:
        if not isinstance(line.get("loss"), int | float):
            raise InputError(f"{run / 'metrics.jsonl'} is damaged: step {line['step']} has no loss")
    steps, losses = (np.array([line[name] for line in lines], float) for name in ("step", "loss"))
    width = max(1.0, float(steps[-1]) / BINS)
    used, where = np.unique(((steps - 1) // width).astype(int), return_inverse=True)
    finite = np.isfinite(losses)
    above = np.bincount(where[finite], losses[finite], minlength=len(used))
    below = np.bincount(where[finite], minlength=len(used))
    rows = pl.concat(
        [
            sums("loss", [""], [[a]], [[b]], axis="step", edges=[start, start + width])
            for start, a, b in zip(used * width + 1, above, below, strict=True)
        ]
    )
    return identified(whose, [rows, fact("steps", float(steps[-1]))])


@dataclass(frozen=True)
class Corpora:
    """The text that models were trained on: `fingerprints` of the tokens, `sources` with versions.

    Empty for a study that trains on no text, or whose folder was made before this was kept.
    """

    fingerprints: frozenset[str] = frozenset()
    sources: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def below(cls, folder: Path) -> Corpora:
        """What the trainings in the directory of a study left, or what a published folder holds.

        Raises `InputError` where two hold other versions of one source.
        """
        records = sorted(folder.glob(f"cells/*/*/{CORPUS_FILE}"))
        prints: set[str] = set()
        sources: dict[str, str] = {}
        for part in map(cls.read, records or folder.glob(CORPUS_FILE)):
            prints |= part.fingerprints
            for name, version in part.sources.items():
                if sources.setdefault(name, version) != version:
                    raise InputError(
                        f"models of one report were trained on {name} {sources[name]} and "
                        f"{version}: prepare the same corpus for all of them"
                    )
        return cls(frozenset(prints), dict(sorted(sources.items())))

    @classmethod
    def read(cls, file: Path) -> Corpora:
        """The record of one run, or of a published folder."""
        stored = read_object(file)
        prints = stored.get("fingerprints", [stored.get("fingerprint")])
        sources = stored.get("sources")
        if not _texts(prints) or not isinstance(sources, dict) or not _texts(sources.values()):
            raise InputError(f"{file} is damaged: expected fingerprints and sources with versions")
        return cls(frozenset(prints), sources)

    def write(self, folder: Path) -> None:
        """Leave the record in a folder that is to be published, where there is one."""
        if self.fingerprints:
            record = {"fingerprints": sorted(self.fingerprints), "sources": dict(self.sources)}
            write_json(folder / CORPUS_FILE, record)


def refuse_changed_text(runs: Iterable[Path], now: Mapping[str, str] | None = None) -> None:
    """`InputError` where two trainings on the same settings of the data read different data.

    `now` has the fingerprint of what was prepared, by its settings (`canonical_json`). Files behind
    an address can change from one training to the next; their models have other tokenisers and were
    tested on other documents.
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


def _texts(values: object) -> bool:
    return isinstance(values, Iterable) and all(isinstance(value, str) for value in values)
