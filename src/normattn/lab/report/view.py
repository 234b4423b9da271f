"""Cached queries over the measurements table, and the points of figures."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import polars as pl

from normattn.lab.report.figures import Point
from normattn.lab.stats import Estimate, Metric, Sums, contrast, estimate, select, select_sums
from normattn.lab.stats.arrays import Where
from normattn.lab.stats.metrics import Length, Term


@dataclass
class View:
    """Cached queries over the measurements table."""

    frame: pl.DataFrame
    _cache: dict[tuple[Any, ...], Any] = field(default_factory=dict, repr=False)

    def _cached(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        if key not in self._cache:
            self._cache[key] = make()
        return self._cache[key]

    def values(self, column: str, where: Where | None = None) -> list[Any]:
        """The unique values of a column in the rows `where`, in order of appearance."""

        def query() -> list[Any]:
            columns = {column, *(where or {})}
            frame = self.frame.select(name for name in self.frame.columns if name in columns)
            return select(frame, where or {})[column].unique(maintain_order=True).to_list()

        return list(self._cached(("values", column, *sorted((where or {}).items())), query))

    def only_value(self, column: str, where: Where | None = None) -> Any:
        """The single value of a column in the rows `where`; None where there is not just one."""
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

        def query() -> Sums | None:
            selected = tuple(name for name in ("row", "method") if name in where)
            by = ("statistic", *selected)
            parts = self._cached(("parts", *by), lambda: self.frame.partition_by(by, as_dict=True))
            part = parts.get((statistic, *(where[name] for name in selected)), self.frame.clear())
            return select_sums(part, statistic, where)

        sums: Sums | None = self._cached(("sums", statistic, *sorted(where.items())), query)
        return sums

    @cached_property
    def evaluated(self) -> pl.DataFrame:
        """The measurements of evaluations, without those of trainings."""
        return self.frame.filter(pl.col("protocol") != "training")

    def estimate(self, metric: Metric, where: Where | None = None) -> Estimate | None:
        """The metric in the rows `where`, with its interval.

        None where a term was not measured, where terms share no seed, and for the difference of a
        row to itself.
        """
        terms = []
        for term in metric.terms:
            place = {**(where or {}), **term.where}
            if isinstance(place.get("length"), Length):
                place["length"] = self._tokens(place)
                if place["length"] is None:
                    return None
            terms.append(replace(term, where=place))
        if len(terms) > 1 and len({term.place for term in terms}) == 1:
            return None
        key = ("estimate", *((term.factor, term.value, term.place) for term in terms))
        estimated: Estimate | None = self._cached(key, lambda: self._contrast(terms))
        return estimated

    def finite_estimate(self, metric: Metric, where: Where | None = None) -> Estimate | None:
        """The estimate; None also where nothing was counted."""
        estimate = self.estimate(metric, where)
        return None if estimate is None or not math.isfinite(estimate.value) else estimate

    def _contrast(self, terms: Sequence[Term]) -> Estimate | None:
        """The terms added up; None where one was not measured or no seed is shared."""
        weighted = []
        for term in terms:
            sums, bins = self.sums(term.name, term.where), term.bins
            if sums is not None and bins is not None:
                if callable(bins):
                    sums = bins(sums)
                else:
                    sums = sums.between(*bins) if isinstance(bins, tuple) else sums.at(bins)
            if sums is None:
                return None
            weighted.append((term.factor, sums))
        if not set.intersection(*(set(sums.seeds) for _, sums in weighted)):
            return None
        return contrast(weighted, [term.value for term in terms])

    def _tokens(self, where: Where) -> int | None:
        """The length in tokens that `where` describes; None if nothing was evaluated."""
        length: Length = where["length"]
        others = {name: value for name, value in where.items() if name != "length"}
        if length.multiple:
            trained = self.values("train_length", others)
            return round(length.multiple * trained[0]) if trained else None
        lengths = self.values("length", others)
        return (max if length.name == "longest" else min)(lengths) if lengths else None


def bin_points(
    view: View, metric: Metric, where: Where, x: Callable[[tuple[Any, ...]], float]
) -> tuple[Point, ...]:
    """A point for each bin (layer, head, start, end) with counts, at `x(bin)`."""
    sums = view.sums(metric.name, where)
    if sums is None:
        return ()
    points = []
    for index, bin_ in enumerate(sums.bins):
        value = estimate(sums.at(slice(index, index + 1)), metric)
        if math.isfinite(value.value):
            points.append(Point.of(float(x(bin_)), value))
    return tuple(points)


def points(view: View, metrics: Iterable[tuple[float, Metric]]) -> tuple[Point, ...]:
    """A point for each x whose metric was measured."""
    estimates = ((x, view.finite_estimate(metric)) for x, metric in metrics)
    return tuple(Point.of(float(x), value) for x, value in estimates if value is not None)


def step_points(view: View, statistic: str, where: Where) -> tuple[Point, ...]:
    """A statistic of trainings by step: mean and range over the seeds that reached it.

    `where` selects the trainings of one row, and may name another protocol than "training".
    """
    per_step: dict[float, list[float]] = {}
    training = {"protocol": "training", "axis": "step", "statistic": statistic}
    rows = select(view.frame, {**training, **where}).sort("bin", "seed")
    for step, total, count in rows.select("bin", "sum", "of").rows():
        if count:
            per_step.setdefault(step, []).append(total / count)
    return tuple(
        Point(step, sum(v) / len(v), min(v), max(v)) for step, v in sorted(per_step.items())
    )


def octaves(view: View, metric: Metric, where: Where) -> list[tuple[int, str, tuple[float, float]]]:
    """(start, title, span) of the positions from 0 to L, to 2 L, to 4 L, …

    Spans are positions rather than bins, as rows evaluated at other lengths have other bins.
    """
    rows = select(view.frame, {**where, "statistic": metric.name})
    if not rows.height:
        return []
    length = int(rows["train_length"][0])
    bins = rows.select("bin", "bin_end").unique().sort("bin").rows()
    spans = []
    for low, high in pairwise((0, *(length * 2**octave for octave in range(40)))):
        ends = [end for start, end in bins if low <= start < high]
        if ends:
            spans.append((low, f"{low + 1:,} to {max(ends):,.0f}", (float(low), max(ends))))
    return spans
