"""From rows of the measurements to arrays: sums over seeds × units × bins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from normattn.errors import InputError

Array = NDArray[np.float64]
Where = Mapping[str, Any]
"""Columns of the frame and the value that each must have (None: null)."""
PLACE = ("layer", "head", "bin", "bin_end")


@dataclass(frozen=True)
class Sums:
    """One statistic of one row: arrays (seeds, units, bins), seeds and units ascending.

    `bins` are (layer, head, bin, bin_end) of each place, ascending. `label` says in words whose
    sums they are; `data` is the digest of what was measured on.
    """

    label: str
    data: str
    seeds: tuple[int, ...]
    units: tuple[str, ...]
    bins: tuple[tuple[Any, ...], ...]
    numerator: Array
    denominator: Array

    def only(self, seeds: tuple[int, ...], units: tuple[str, ...]) -> Sums:
        """The sums of some of the seeds and units."""
        if (seeds, units) == (self.seeds, self.units):
            return self
        position = {name: index for index, name in enumerate(self.units)}
        rows = np.ix_([self.seeds.index(s) for s in seeds], [position[name] for name in units])
        above, below = self.numerator[rows], self.denominator[rows]
        return replace(self, seeds=seeds, units=units, numerator=above, denominator=below)

    def at(self, chosen: slice | Sequence[int]) -> Sums:
        """The sums of some of the bins."""
        every = range(len(self.bins))
        kept = list(every[chosen] if isinstance(chosen, slice) else chosen)
        above, below = self.numerator[..., kept], self.denominator[..., kept]
        bins = tuple(self.bins[index] for index in kept)
        return replace(self, bins=bins, numerator=above, denominator=below)

    def between(self, low: float, high: float) -> Sums | None:
        """The sums of the bins of an axis from `low` to `high`; None where they end elsewhere."""
        kept = [n for n, (*_, start, _) in enumerate(self.bins) if low <= start < high]
        return self.at(kept) if kept and self.bins[kept[-1]][-1] == high else None

    def by_unit(self) -> Sums:
        """Every unit as a bin of its own too, for what is no function of sums, as a median."""
        alone = np.eye(len(self.units))
        above, below = (
            part.sum(-1)[..., None] * alone for part in (self.numerator, self.denominator)
        )
        bins = tuple((None, None, float(n), float(n + 1)) for n in range(len(self.units)))
        return replace(self, bins=bins, numerator=above, denominator=below)


def select(frame: pl.DataFrame, where: Where) -> pl.DataFrame:
    """The rows that have these values; `InputError` for a column that the frame lacks."""
    for name in where:
        if name not in frame.columns:
            raise InputError(f"the measurements have no column {name}")
    tests = [
        pl.col(name).is_null() if value is None else pl.col(name) == value
        for name, value in where.items()
    ]
    return frame.filter(*tests) if tests else frame


def gathered(frame: pl.DataFrame, statistic: str, where: Where | None = None) -> Sums | None:
    """The sums of a statistic in some rows; None where there are none.

    Raises `InputError` where the rows are of several data sets, or a seed lacks a unit or a bin
    that another has: such numbers cannot be added up or paired.
    """
    rows = select(frame, {**(where or {}), "statistic": statistic})
    if not rows.height:
        return None
    names = rows.select("row", "method").unique().sort("row", "method").rows()
    label = ", ".join(f"{row} with {method}" if method else row for row, method in names)
    data = rows["data"].unique().to_list()
    if len(data) > 1:
        raise InputError(f"{label}: {statistic} was measured on {len(data)} data sets; keep one")
    places = rows.select(PLACE).unique().sort(PLACE).with_row_index("place")
    seeds = tuple(sorted(rows["seed"].unique().to_list()))
    units = tuple(sorted(rows["unit"].unique().to_list()))
    shape = (len(seeds), len(units), places.height)
    if rows.height != shape[0] * shape[1] * shape[2]:
        raise InputError(
            f"{label}: {statistic} has {rows.height:,} sums where {shape[0]} seeds, {shape[1]} "
            f"units and {shape[2]} bins need {int(np.prod(shape)):,}"
        )
    placed = rows.join(places, on=PLACE, how="left", nulls_equal=True)
    ordered = placed.sort("seed", "unit", "place")
    numerator, denominator = (ordered[name].to_numpy().reshape(shape) for name in ("sum", "of"))
    bins = tuple(places.drop("place").rows())
    return Sums(label, str(data[0]), seeds, units, bins, numerator, denominator)


def on_common_sets(frame: pl.DataFrame, apart: Sequence[str] = ()) -> pl.DataFrame:
    """The rows on the data set that most rows of their protocol and length share.

    Of equally common ones the one with the greatest digest, so that the choice is repeatable.
    Rows that differ in one of the columns `apart` (or in the task) are never compared; rows of
    trainings that name no data, as their loss, are kept. `left_out` says what is not
    among them.
    """
    if not frame.height:
        return frame
    keys = ["protocol", "length"]
    keys += [name for name in frame.columns if name in ("factor.task", *apart)]
    counted = frame.group_by(*keys, "data").agg(pl.struct("row", "method", "seed").n_unique())
    kept = (pl.col("protocol") == "training") & (pl.col("data") == "")
    compared = counted.filter(~kept).sort("row", "data", descending=True)
    best = pl.concat([compared.unique(keys, keep="first"), counted.filter(kept)])
    return frame.join(best.select(*keys, "data"), on=[*keys, "data"], how="semi", nulls_equal=True)


def left_out(frame: pl.DataFrame, kept: pl.DataFrame) -> list[str]:
    """Which measurements of `frame` are not among those `kept`, a sentence for each row."""
    whose = frame.join(kept, on=kept.columns, how="anti", nulls_equal=True)
    whose = whose.select("row", "method", "protocol", "length", "seed").unique()
    grouped = whose.group_by("row", "method", "protocol", "length").agg(pl.col("seed").sort())
    return [
        f"{row}{f' with {method}' if method else ''}, seed {', '.join(map(str, seeds))}: "
        f"{protocol} at {length} was measured on other data than most rows, and is left out"
        for row, method, protocol, length, seeds in grouped.sort(pl.all().exclude("seed")).rows()
    ]
