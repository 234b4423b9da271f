"""The frame as a page reads it: contrasts by where they are looked up, each made once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import polars as pl

from normattn.lab.stats import Bootstrap, Estimate, Statistic, Sums, contrast, gathered, select
from normattn.lab.stats.arrays import Where

Bins = slice | list[int] | tuple[float, float]


@dataclass(frozen=True)
class Term:
    """factor · statistic in the rows `where`, over some of their bins (None: all).

    `bins` are the places of bins, or where on their axis they begin and end.
    """

    factor: float
    where: Where
    bins: Bins | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells it from other terms."""
        return (self.factor, repr(self.bins), *sorted(self.where.items()))


@dataclass
class View:
    """A frame to be asked; equal questions are answered once."""

    frame: pl.DataFrame
    bootstrap: Bootstrap = field(default_factory=Bootstrap)
    _values: dict[tuple[Any, ...], list[Any]] = field(default_factory=dict, repr=False)
    _parts: dict[tuple[Any, ...], pl.DataFrame] = field(default_factory=dict, repr=False)
    _sums: dict[tuple[Any, ...], Sums | None] = field(default_factory=dict, repr=False)
    _contrasts: dict[tuple[Any, ...], Estimate | None] = field(default_factory=dict, repr=False)

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

    def contrast(self, statistic: Statistic, terms: Sequence[Term]) -> Estimate | None:
        """Σ factor · statistic over the terms; None where one was not measured."""
        key = (statistic, *(term.key for term in terms))
        if key not in self._contrasts:
            self._contrasts[key] = self._contrast(statistic, terms)
        return self._contrasts[key]

    def _contrast(self, statistic: Statistic, terms: Sequence[Term]) -> Estimate | None:
        weighted = []
        for term in terms:
            sums = _of_bins(self.sums(statistic.name, term.where), term.bins)
            if sums is None:
                return None
            weighted.append((term.factor, sums))
        if not shares_seeds(weighted):
            return None
        return contrast(weighted, statistic, self.bootstrap)

    def estimate(self, statistic: Statistic, where: Where) -> Estimate | None:
        """The statistic in some rows; None where nothing was measured."""
        return self.contrast(statistic, [Term(1.0, where)])


def _of_bins(sums: Sums | None, bins: Bins | None) -> Sums | None:
    if sums is None or bins is None:
        return sums
    return sums.between(*bins) if isinstance(bins, tuple) else sums.at(bins)


def shares_seeds(terms: Sequence[tuple[float, Sums]]) -> bool:
    """Whether some seed is in every term: else there is nothing to pair."""
    return bool(set.intersection(*(set(sums.seeds) for _, sums in terms)))
