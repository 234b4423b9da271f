"""The line of a page that says which of its trained models have which seeds."""

from __future__ import annotations

import polars as pl

from normattn.lab.stats.measurements import FACTOR

FEW = 3

Seeds = tuple[int, ...]


def seeds_line(frame: pl.DataFrame) -> str:
    """Which rows have which seeds; of a model that was not read yet only its training is there.

    Where a row's trainings vary in something that decides how many seeds they have, that is said
    too: "0, 1, 2 of KNA with change gau; 0 of KNA with change layers-12".
    """
    read = frame.filter((pl.col("protocol") != "training") | (pl.col("statistic") == "diverged"))
    factors = _of_trainings(frame)
    groups: dict[tuple[Seeds, str], list[str]] = {}
    for row in sorted(frame["row"].unique().to_list()):
        own = read.filter(row=row)
        for seeds, varied in _by_seeds(own if own.height else frame.filter(row=row), factors):
            groups.setdefault((seeds, varied), []).append(row)
    said = "; ".join(
        f"{', '.join(map(str, seeds))} of {', '.join(rows)}{varied}"
        for (seeds, varied), rows in groups.items()
    )
    if any(len(seeds) < FEW for seeds, _ in groups):
        said += (
            f". A row of fewer than {FEW} seeds speaks of those trained models, not of the score"
        )
    return said


def _of_trainings(frame: pl.DataFrame) -> list[str]:
    """The factors that trainings have: others are of what was read, as a task."""
    trained = frame.filter(protocol="training")
    names = [name for name in frame.columns if name.startswith(FACTOR)]
    return [name for name in names if trained[name].null_count() < trained.height]


def _by_seeds(own: pl.DataFrame, factors: list[str]) -> list[tuple[Seeds, str]]:
    """The seeds of a row's trainings, and in words what those of these seeds are."""
    trainings = (
        [(values, _seeds(part)) for values, part in own.group_by(factors)] if factors else []
    )
    if len({seeds for _, seeds in trainings}) < 2:
        return [(_seeds(own), "")]
    # The first factor that decides the seeds alone is enough; else it takes them all.
    for column, name in enumerate(factors):
        decided = {(values[column], seeds) for values, seeds in trainings}
        if len(decided) == len({value for value, _ in decided}):
            return _worded(_plain(name), [(str(value), seeds) for value, seeds in decided])
    names = [_plain(name) for name in factors]
    said = [
        (" ".join(f"{n}{v}" for n, v in zip(names, values, strict=True) if v is not None), seeds)
        for values, seeds in trainings
    ]
    return _worded("", said)


def _plain(name: str) -> str:
    return f"{name.removeprefix(FACTOR).replace('_', ' ')} "


def _worded(name: str, trainings: list[tuple[str, Seeds]]) -> list[tuple[Seeds, str]]:
    """The seeds that there are, the most first, each with " with change gau, preset"."""
    by_seeds: dict[Seeds, list[str]] = {}
    for value, seeds in sorted(trainings, key=lambda training: (-len(training[1]), training)):
        by_seeds.setdefault(seeds, []).append(value)
    return [(seeds, f" with {name}{', '.join(values)}") for seeds, values in by_seeds.items()]


def _seeds(rows: pl.DataFrame) -> Seeds:
    return tuple(sorted(rows["seed"].unique().to_list()))
