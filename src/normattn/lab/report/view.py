"""The measurements table as a page reads it: every number is computed once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import polars as pl

from normattn.lab.stats import Bootstrap, Estimate, Metric, Sums, contrast, gathered, select
from normattn.lab.stats.arrays import Where
from normattn.lab.stats.metrics import Bins, Length, Term


@dataclass
class View:
    """Cached queries over the measurements table."""

    frame: pl.DataFrame
    bootstrap: Bootstrap = field(default_factory=Bootstrap)
    _values: dict[tuple[Any, ...], list[Any]] = field(default_factory=dict, repr=False)
    _parts: dict[tuple[Any, ...], pl.DataFrame] = field(default_factory=dict, repr=False)
    _sums: dict[tuple[Any, ...], Sums | None] = field(default_factory=dict, repr=False)
    _estimates: dict[tuple[Any, ...], Estimate | None] = field(default_factory=dict, repr=False)

    def values(self, column: str, where: Where | None = None) -> list[Any]:
        """What a column of the frame holds in some rows, in the order of its appearance."""
        key = (column, *sorted((where or {}).items()))
        if key not in self._values:
            asked = {column, *(where or {})}
            narrow = self.frame.select(name for name in self.frame.columns if name in asked)
            rows = select(narrow, where or {})
            self._values[key] = rows[column].unique(maintain_order=True).to_list()
        return list(self._values[key])

    def one(self, column: str, where: Where | None = None) -> Any:
        """The one value that a column has in some rows; None where there are none or several."""
        values = self.values(column, where)
        return values[0] if len(values) == 1 else None

    def lengths(self, protocol: str) -> list[int]:
        """The lengths that a protocol was read at, ascending."""
        return sorted(self.values("length", {"protocol": protocol}))

    def longest(self, protocol: str) -> int | None:
        """The longest length that a protocol was read at."""
        return max(self.lengths(protocol), default=None)

    def sums(self, statistic: str, where: Where) -> Sums | None:
        """The sums of a statistic; None where nothing was measured."""
        key = (statistic, *sorted(where.items()))
        if key not in self._sums:
            self._sums[key] = gathered(self._part(statistic), statistic, where)
        return self._sums[key]

    def _part(self, statistic: str) -> pl.DataFrame:
        """The frame's rows of a statistic, set apart once: a page asks each for many rows."""
        if not self._parts:
            self._parts = self.frame.partition_by("statistic", as_dict=True)
        return self._parts.get((statistic,), self.frame.clear())

    def estimate(self, metric: Metric, where: Where | None = None) -> Estimate | None:
        """The metric in some rows, with its interval.

        None where a part of it was not measured or no seed is shared, and for the difference of
        a row to itself.
        """
        terms = self._resolved(metric.under(where or {}).terms)
        if terms is None or (len(terms) > 1 and len({term.place for term in terms}) == 1):
            return None
        key = tuple(term.key for term in terms)
        if key not in self._estimates:
            self._estimates[key] = self._estimate(terms)
        return self._estimates[key]

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
        if not shares_seeds(weighted):
            return None
        return contrast(weighted, [term.value for term in terms], self.bootstrap)

    def _resolved(self, terms: Sequence[Term]) -> list[Term] | None:
        """The terms with their lengths as numbers; None where no such length was read."""
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
    return sums.at(bins if isinstance(bins, slice) else list(bins))


def shares_seeds(terms: Sequence[tuple[float, Sums]]) -> bool:
    """Whether some seed is in every term: else there is nothing to pair."""
    return bool(set.intersection(*(set(sums.seeds) for _, sums in terms)))
