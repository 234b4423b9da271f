"""Folders of one study whose cells were trained apart (other seeds, other machines), as one frame.

What one frame needs: the same settings in every folder, no cell in two of them, and the same
documents wherever the same protocol was measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import polars as pl

from normattn.errors import InputError
from normattn.lab.stats import measurements
from normattn.lab.stats.measurements import FACTOR
from normattn.lab.sweep.collect import Corpora
from normattn.lab.sweep.config import free_settings
from normattn.settings import first_difference

CELL = ("row", "seed")
SET = ("protocol", "length", "split")
TASK = "factor.task"
ADDRESS = "training.data.corpus"
"""Two addresses may name one text: what was trained on is then told by its tokens."""


def joined_cells(
    folders: Sequence[Path],
    configurations: Sequence[Mapping[str, Any]],
    frames: Sequence[pl.DataFrame],
    corpora: Sequence[Corpora],
) -> pl.DataFrame:
    """The frames of `folders`, which hold other cells of one study, as one.

    Raises `InputError` that names two folders where their settings differ, where both hold a cell,
    and where one protocol was measured on other documents in each.
    """
    for first, second in combinations(range(len(folders)), 2):
        two = f"{folders[first]} and {folders[second]}"
        same_text = corpora[first] == corpora[second] != Corpora()
        _refuse_other_settings(two, configurations[first], configurations[second], same_text)
        _refuse_shared_cells(two, frames[first], frames[second])
        _refuse_other_documents(two, frames[first], frames[second])
    return measurements.joined(frames)


def _refuse_other_settings(
    two: str, one: Mapping[str, Any], other: Mapping[str, Any], same_text: bool
) -> None:
    free = free_settings(one, other) | ({ADDRESS} if same_text else frozenset())
    differs = first_difference(dict(one), dict(other), free)
    if differs is not None:
        name, here, there = differs
        raise InputError(
            f"{two} are not on one page: {name} is {here} in the first and {there} in the second"
        )


def _refuse_shared_cells(two: str, one: pl.DataFrame, other: pl.DataFrame) -> None:
    """A training is told by its row, its seed and what else its loss curve was said to vary in."""
    trained = [part.filter(protocol="training") for part in (one, other)]
    apart: list[str] = []
    if all(part.height for part in trained):
        names = {name for part in trained for name in part.columns if name.startswith(FACTOR)}
        apart = sorted(names - {TASK})
        one, other = (_with(part, apart) for part in trained)
    keys = [*CELL, *apart]
    cells = [part.select(keys).unique() for part in (one, other)]
    shared = cells[0].join(cells[1], on=keys, nulls_equal=True).sort(keys)
    if shared.height:
        row, seed, *others = shared.row(0)
        varied = ", ".join(str(value) for value in others if value not in (None, row))
        named = f"{row} seed {seed}" + (f" ({varied})" if varied else "")
        raise InputError(f"{two} both hold {named}; each cell may stand in one of them")


def _with(part: pl.DataFrame, columns: Sequence[str]) -> pl.DataFrame:
    """The frame with all of these columns, as text, empty where it had none."""
    absent = [pl.lit(None).alias(name) for name in columns if name not in part.columns]
    return part.with_columns(absent).with_columns(pl.col(columns).cast(pl.String))


def _refuse_other_documents(two: str, one: pl.DataFrame, other: pl.DataFrame) -> None:
    keys = [*SET, *([TASK] if TASK in one.columns and TASK in other.columns else [])]
    known = [part.select(*keys, "data").unique() for part in (one, other)]
    measured = known[0].join(known[1], on=keys, nulls_equal=True).select(keys).unique()
    same = known[0].join(known[1], on=[*keys, "data"], nulls_equal=True).select(keys).unique()
    apart = measured.join(same, on=keys, how="anti", nulls_equal=True).sort(keys)
    if apart.height:
        protocol, length = apart.row(0)[:2]
        raise InputError(
            f"{two} were measured on different documents ({protocol} at length {length}): prepare "
            "the same corpus for both"
        )
