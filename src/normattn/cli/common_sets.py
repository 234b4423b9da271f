"""Runs on one page, evaluated with the same methods on the same text windows.

A run may have been evaluated several times, of other lengths or windows, and each time leaves
records. A page compares rows on one set of text windows for each protocol and length; measurements
on any other set are left out, with a warning on stderr.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from pathlib import Path

import polars as pl

from normattn.errors import InputError
from normattn.lab.stats import joined
from normattn.lab.stats.arrays import on_common_sets
from normattn.lab.studies.reading import OWN_TABLES
from normattn.lab.sweep.measuring import EVALUATIONS, asked_alone
from normattn.terminal import warn

LAST = "last_segment"
CELL = ("row", "method", "seed", "protocol", "length")


def on_one_text(runs: Mapping[Path, pl.DataFrame]) -> pl.DataFrame:
    """The rows of all runs on the sets of text windows that most of them share.

    Warns on stderr about what this leaves out. Raises `InputError` where a run's last segment was
    evaluated on several sets of windows, a row's method with several parameters, where two runs
    are the same training, and where all of a run would be left out.
    """
    for run, rows in runs.items():
        _refuse_other_windows(run, _read(rows))
    whole = joined(runs.values())
    _refuse_other_ways(_read(whole))
    _refuse_shared(runs)
    kept = on_common_sets(whole)
    for run, rows in runs.items():
        _tell_lost(run, _read(rows), kept)
    return kept


def _read(rows: pl.DataFrame) -> pl.DataFrame:
    """What was read of texts, without the trainings."""
    return rows.filter(pl.col("protocol") != "training", pl.col("statistic") != "diverged")


def _refuse_other_windows(run: Path, read: pl.DataFrame) -> None:
    """`InputError` where the last segment after one length is not that after another.

    Evaluations with other longest contexts, or other numbers of windows, score other tokens: their
    difference is not what a context adds. One evaluation scores as many of each document at all
    its lengths.
    """
    rows = read.filter(protocol=LAST, statistic="loss")
    for (row, method), own in rows.group_by("row", "method", maintain_order=True):
        sets = own.group_by("seed", "length").agg(pl.col("data").n_unique()).sort("length")
        counted = own.group_by("seed", "length", "unit").agg(pl.col("of").sum())
        if sets["data"].max() == 1 and counted.select("seed", "unit", "of").unique().height == (
            counted.select("seed", "unit").unique().height
        ):
            continue
        raise InputError(
            f"{run} was evaluated several times, and the last segments of {_called(row, method)} "
            "are not the same tokens at each length; expected one evaluation with all lengths: "
            f"remove the records in {_records(run)} and evaluate it once more"
        )


def _refuse_other_ways(read: pl.DataFrame) -> None:
    """`InputError` where one row of a table would hold two scores, as of YaRN by two factors."""
    table = pl.when(pl.col("protocol").is_in(OWN_TABLES)).then("protocol").otherwise(pl.lit(""))
    scores = read.with_columns(table.alias("table")).group_by("row", "method", "table")
    several = scores.agg(pl.col("score").unique().sort()).filter(pl.col("score").list.len() > 1)
    for row, method, _, ways in several.sort("row", "method", "table").rows():
        raise InputError(
            f"{_called(row, method)} was evaluated as {ways[0]} and as {ways[1]}, and a page has "
            "one row for it: evaluate all runs with the same longest length, or the method with "
            "its own number, and remove the other records"
        )


def _refuse_shared(runs: Mapping[Path, pl.DataFrame]) -> None:
    """`InputError` where two runs hold the same row and seed, read in the same way."""
    cells = {run: _read(rows).select(CELL).unique() for run, rows in runs.items()}
    for one, other in combinations(cells, 2):
        both = cells[one].join(cells[other], on=CELL).sort(CELL)
        if both.height:
            row, _, seed, *_ = both.row(0)
            raise InputError(
                f"{one} and {other} both hold {row} seed {seed}, trained alike; expected each "
                "training once: give one of them"
            )


def _tell_lost(run: Path, read: pl.DataFrame, kept: pl.DataFrame) -> None:
    """Say what of a run is not on the page; `InputError` where nothing of it is."""
    mine = read.join(kept, on=[*CELL, "data"], how="semi")
    lost = read.join(mine, on=CELL, how="anti").select("row", "protocol", "length").unique()
    if not lost.height:
        return
    places = [
        f"{row} ({protocol} at length {length})"
        for row, protocol, length in lost.sort("row", "protocol", "length").rows()
    ]
    if not mine.height:
        raise InputError(
            f"{run} was evaluated on different text windows from most of the runs, so none of its "
            f"measurements can be compared with theirs, such as {places[0]}; expected the same "
            "corpus, lengths and windows: evaluate it so, or make a page of it alone"
        )
    warn(
        f"normattn: {run}: left out, as most runs were evaluated on different text windows: "
        f"{', '.join(places)}"
    )


def _records(run: Path) -> Path:
    """Where what `normattn evaluate` has measured of a run lies."""
    alone = asked_alone(run)
    return alone.folder if len(alone) else run / EVALUATIONS


def _called(row: str, method: str) -> str:
    return f"{row} with {method}" if method else row
