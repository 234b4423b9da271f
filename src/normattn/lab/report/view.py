"""The measurements table as a report reads it: every number is computed once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import polars as pl

from normattn.lab.report.figures import Point
from normattn.lab.stats import (
    Bootstrap,
    Estimate,
    Metric,
    Sums,
    contrast,
    estimate,
    gathered,
    select,
)
from normattn.lab.stats.arrays import Where
from normattn.lab.stats.metrics import Bins, Length, Term


@dataclass
class View:
    """Cached queries over the measurements table."""

    frame: pl.DataFrame
    bootstrap: Bootstrap = field(default_factory=Bootstrap)
    _kept: dict[tuple[Any, ...], Any] = field(default_factory=dict, repr=False)

    def _once(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        """What `make` returns, made once for a key: a report asks for each number many times."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    def values(self, column: str, where: Where | None = None) -> list[Any]:
        """The values that a column has in some rows, in the order of appearance."""

        def found() -> list[Any]:
            needed = {column, *(where or {})}
            narrow = self.frame.select(name for name in self.frame.columns if name in needed)
            return select(narrow, where or {})[column].unique(maintain_order=True).to_list()

        return list(self._once(("values", column, *sorted((where or {}).items())), found))

    def one(self, column: str, where: Where | None = None) -> Any:
        """The one value that a column has in some rows; None where there are none or several."""
        values = self.values(column, where)
        return values[0] if len(values) == 1 else None

    def lengths(self, protocol: str) -> list[int]:
        """The lengths that a protocol was evaluated at, ascending."""
        return sorted(self.values("length", {"protocol": protocol}))

    def longest(self, protocol: str) -> int | None:
        """The longest length that a protocol was evaluated at."""
        return max(self.lengths(protocol), default=None)

    def sums(self, statistic: str, where: Where) -> Sums | None:
        """The sums of a statistic; None where nothing was measured."""

        def found() -> Sums | None:
            named = tuple(name for name in ("row", "method") if name in where)
            by = ("statistic", *named)
            parts = self._once(("parts", *by), lambda: self.frame.partition_by(by, as_dict=True))
            part = parts.get((statistic, *(where[name] for name in named)), self.frame.clear())
            return gathered(part, statistic, where)

        sums: Sums | None = self._once(("sums", statistic, *sorted(where.items())), found)
        return sums

    @cached_property
    def read(self) -> pl.DataFrame:
        """What was evaluated: the measurements without those of trainings."""
        return self.frame.filter(pl.col("protocol") != "training")

    def estimate(self, metric: Metric, where: Where | None = None) -> Estimate | None:
        """The metric in some rows, with its interval.

        None where a part of it was not measured or no seed is shared, and for the difference of
        a row to itself.
        """
        terms = self._resolved(metric.under(where or {}).terms)
        if terms is None or (len(terms) > 1 and len({term.place for term in terms}) == 1):
            return None
        key = ("estimate", *(term.key for term in terms))
        estimated: Estimate | None = self._once(key, lambda: self._estimate(terms))
        return estimated

    def known(self, metric: Metric, where: Where | None = None) -> Estimate | None:
        """The same; None too where nothing was counted."""
        estimate = self.estimate(metric, where)
        return None if estimate is None or not math.isfinite(estimate.value) else estimate

    def _estimate(self, terms: Sequence[Term]) -> Estimate | None:
        weighted = []
        for term in terms:
            sums = _of_bins(self.sums(term.name, term.where), term.bins)
            if sums is None:
                return None
            weighted.append((term.factor, sums))
        if not set.intersection(*(set(sums.seeds) for _, sums in weighted)):
            return None  # no seed in every term: there is nothing to pair
        return contrast(weighted, [term.value for term in terms], self.bootstrap)

    def _resolved(self, terms: Sequence[Term]) -> list[Term] | None:
        """The terms with their lengths as numbers; None where no such length was evaluated."""
        resolved = []
        for term in terms:
            length = term.where.get("length")
            if isinstance(length, Length):
                tokens = self._tokens(length, term.where)
                if tokens is None:
                    return None
                term = replace(term, where={**term.where, "length": tokens})
            resolved.append(term)
        return resolved

    def _tokens(self, length: Length, where: Where) -> int | None:
        others = {name: value for name, value in where.items() if name != "length"}
        if length.multiple:
            trained = self.values("train_length", others)
            return round(length.multiple * trained[0]) if trained else None
        lengths = self.values("length", others)
        return (max if length.name == "longest" else min)(lengths) if lengths else None


def _of_bins(sums: Sums | None, bins: Bins | None) -> Sums | None:
    if sums is None or bins is None:
        return sums
    if callable(bins):
        return bins(sums)
    if isinstance(bins, tuple):
        return sums.between(*bins)
    return sums.at(bins)


def bin_points(
    view: View, metric: Metric, where: Where, x: Callable[[tuple[Any, ...]], float]
) -> tuple[Point, ...]:
    """A point for every bin (layer, head, start, end) in which something was counted, at `x`."""
    sums = view.sums(metric.name, where)
    if sums is None:
        return ()
    points = []
    for place, bin_ in enumerate(sums.bins):
        value = estimate(sums.at(slice(place, place + 1)), metric, view.bootstrap)
        if math.isfinite(value.value):
            points.append(Point.of(float(x(bin_)), value))
    return tuple(points)


def points(view: View, metric: Metric, where: Iterable[tuple[float, Where]]) -> tuple[Point, ...]:
    """A point at every x whose rows were measured."""
    estimates = ((x, view.estimate(metric, at)) for x, at in where)
    return tuple(Point.of(float(x), value) for x, value in estimates if value is not None)


def step_points(view: View, statistic: str, where: Where) -> tuple[Point, ...]:
    """What a training recorded, by step: the mean of the seeds that came so far, and their range.

    `where` chooses the trainings of one row; it may name another protocol than "training".
    """
    per_step: dict[float, list[float]] = {}
    training = {"protocol": "training", "axis": "step", "statistic": statistic}
    chosen = select(view.frame, {**training, **where})
    for start, above, below in chosen.sort("bin", "seed").select("bin", "sum", "of").rows():
        if below:
            per_step.setdefault(start, []).append(above / below)
    return tuple(
        Point(step, sum(v) / len(v), min(v), max(v)) for step, v in sorted(per_step.items())
    )


def octaves(view: View, metric: Metric, where: Where) -> list[tuple[int, str, tuple[float, float]]]:
    """The bins of a position between 0, L, 2 L, 4 L …: where each begins, its title, its span.

    Rows that were evaluated at other lengths have other bins: these are found by their positions.
    """
    chosen = select(view.frame, {**where, "statistic": metric.name})
    if not chosen.height:
        return []
    length = int(chosen["train_length"][0])
    bins = chosen.select("bin", "bin_end").unique().sort("bin").rows()
    spans = []
    for low, high in pairwise((0, *(length * 2**octave for octave in range(40)))):
        ends = [end for start, end in bins if low <= start < high]
        if ends:
            spans.append((low, f"{low + 1:,} to {max(ends):,.0f}", (float(low), max(ends))))
    return spans
