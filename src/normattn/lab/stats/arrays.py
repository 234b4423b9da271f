"""Rows of the measurements table as arrays: sums over seeds × units × bins."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from normattn.errors import InputError

Array = NDArray[np.float64]
Where = Mapping[str, Any]
"""Columns of the table, and the value that each must have (None: null)."""
BIN_KEYS = ("layer", "head", "bin", "bin_end")


@dataclass(frozen=True)
class Sums:
    """One statistic of one row: arrays (seeds, units, bins), seeds and units ascending.

    `bins` are (layer, head, bin, bin_end), ascending. `label` names the row in messages, `data` is
    the digest of the evaluated data.
    """

    label: str
    data: str
    seeds: tuple[int, ...]
    units: tuple[str, ...]
    bins: tuple[tuple[Any, ...], ...]
    numerator: Array
    denominator: Array

    def restricted(self, seeds: tuple[int, ...], units: tuple[str, ...]) -> Sums:
        """The sums of some of the seeds and units."""
        if (seeds, units) == (self.seeds, self.units):
            return self
        position = {name: index for index, name in enumerate(self.units)}
        rows = np.ix_([self.seeds.index(s) for s in seeds], [position[name] for name in units])
        return self._each(lambda part: part[rows], seeds=seeds, units=units)

    def at(self, chosen: slice | Sequence[int]) -> Sums:
        """The sums of some of the bins, by index."""
        indices = range(len(self.bins))
        selected = list(indices[chosen] if isinstance(chosen, slice) else chosen)
        bins = tuple(self.bins[index] for index in selected)
        return self._each(lambda part: part[..., selected], bins=bins)

    def between(self, low: float, high: float) -> Sums | None:
        """The sums of the bins from `low` to `high`; None where no bin ends at `high`."""
        selected = [n for n, (*_, start, _) in enumerate(self.bins) if low <= start < high]
        return self.at(selected) if selected and self.bins[selected[-1]][-1] == high else None

    def by_unit(self) -> Sums:
        """The sums with one bin per unit, for values that need single units, such as a median."""
        identity = np.eye(len(self.units))
        bins = tuple((None, None, float(n), float(n + 1)) for n in range(len(self.units)))
        return self._each(lambda part: part.sum(-1)[..., None] * identity, bins=bins)

    def _each(self, change: Callable[[Array], Array], **fields: Any) -> Sums:
        numerator, denominator = change(self.numerator), change(self.denominator)
        return replace(self, numerator=numerator, denominator=denominator, **fields)


def select(frame: pl.DataFrame, where: Where) -> pl.DataFrame:
    """The rows with these values; raises `InputError` for a missing column."""
    for name in where:
        if name not in frame.columns:
            raise InputError(f"the measurements have no column {name}")
    return frame.filter(*(pl.col(name).eq_missing(value) for name, value in where.items()))


def select_sums(frame: pl.DataFrame, statistic: str, where: Where | None = None) -> Sums | None:
    """The sums of a statistic in the rows `where`; None where there are none.

    Raises `InputError` for several data sets, and for a seed that lacks a unit or a bin.
    """
    rows = select(frame, {**(where or {}), "statistic": statistic})
    if not rows.height:
        return None
    names = rows.select("row", "method").unique().sort("row", "method").rows()
    label = ", ".join(f"{row} with {method}" if method else row for row, method in names)
    data = rows["data"].unique().to_list()
    if len(data) > 1:
        raise InputError(f"{label}: {statistic} was measured on {len(data)} data sets; keep one")
    all_bins = rows.select(BIN_KEYS).unique().sort(BIN_KEYS).with_row_index("index")
    seeds = tuple(sorted(rows["seed"].unique().to_list()))
    units = tuple(sorted(rows["unit"].unique().to_list()))
    shape = (len(seeds), len(units), all_bins.height)
    if rows.height != shape[0] * shape[1] * shape[2]:
        raise InputError(
            f"{label}: {statistic} has {rows.height:,} sums where {shape[0]} seeds, {shape[1]} "
            f"units and {shape[2]} bins need {int(np.prod(shape)):,}"
        )
    indexed = rows.join(all_bins, on=BIN_KEYS, how="left", nulls_equal=True)
    ordered = indexed.sort("seed", "unit", "index")
    numerator, denominator = (ordered[name].to_numpy().reshape(shape) for name in ("sum", "of"))
    bins = tuple(all_bins.drop("index").rows())
    return Sums(label, str(data[0]), seeds, units, bins, numerator, denominator)


def keep_common_data(frame: pl.DataFrame, separate: Sequence[str] = ()) -> pl.DataFrame:
    """Keep, for each protocol, length and `separate` columns, the rows on the most common data set.

    The digest decides ties. Rows of trainings without data, such as losses, are kept.
    """
    if not frame.height:
        return frame
    keys = ["protocol", "length"]
    keys += [name for name in frame.columns if name in ("factor.task", *separate)]
    counts = frame.group_by(*keys, "data").agg(pl.struct("row", "method", "seed").n_unique())
    without_data = (pl.col("protocol") == "training") & (pl.col("data") == "")
    compared = counts.filter(~without_data).sort("row", "data", descending=True)
    best = pl.concat([compared.unique(keys, keep="first"), counts.filter(without_data)])
    return frame.join(best.select(*keys, "data"), on=[*keys, "data"], how="semi", nulls_equal=True)


def describe_left_out(frame: pl.DataFrame, kept: pl.DataFrame) -> list[str]:
    """A sentence for each row whose measurements in `frame` are not among those `kept`."""
    dropped = frame.join(kept, on=kept.columns, how="anti", nulls_equal=True)
    dropped = dropped.select("row", "method", "protocol", "length", "seed").unique()
    grouped = dropped.group_by("row", "method", "protocol", "length").agg(pl.col("seed").sort())
    return [
        f"{row}{f' with {method}' if method else ''}, seed {', '.join(map(str, seeds))}: "
        f"{protocol} at {length} was measured on other data than most rows, and is left out"
        for row, method, protocol, length, seeds in grouped.sort(pl.all().exclude("seed")).rows()
    ]
