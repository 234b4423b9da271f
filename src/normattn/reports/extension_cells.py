"""What was read of an extended model, method by method, and its statistics."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from normattn.reports.bootstrap import Bootstrap
from normattn.reports.cells import Cell, Cells, RowKey, row_key
from normattn.reports.extension_records import AnyUnit, KeyUnit, TextUnit, joined, whole
from normattn.reports.metrics import METRICS, Estimate, Metric, difference, estimate

LAST_LOSS, LAST_ACCURACY = METRICS["last_segment_loss"], METRICS["last_segment"]
TRAIN_LOSS = METRICS["train_loss"]


@dataclass(frozen=True)
class Cost:
    """Of one method at one length: median seconds, most bytes (or None), pass keys found of all."""

    prefill_seconds: float
    peak_bytes: int | None
    found: int
    asked: int


class Readings:
    """Everything that was read in all its windows, by row and length; the model as it is first."""

    def __init__(
        self, units: Sequence[AnyUnit], windows: int, bootstrap: Bootstrap | None = None
    ) -> None:
        groups = whole(units, windows)
        self.bootstrap = bootstrap or Bootstrap()
        self.cells = Cells(joined(groups))
        self.costs: dict[tuple[RowKey, int], Cost] = {}
        self.methods: dict[RowKey, str] = {}
        for group in groups:
            row = row_key(group[0].records[0])
            self.methods[row] = group[0].method
            keys = _keys(units, group[0].method, group[0].length)
            self.costs[row, group[0].length] = _cost(group, keys)

    @property
    def rows(self) -> list[RowKey]:
        """The methods in the order of the tables."""
        return self.cells.rows

    @property
    def plain(self) -> RowKey | None:
        """The model as it is, where it was read."""
        return next((row for row in self.rows if not row.method), None)

    def value(self, row: RowKey, metric: Metric, length: int) -> Estimate | None:
        """A statistic, or None where it was not read."""
        cell = self._cell(row, metric, length)
        return None if cell is None else estimate(cell, metric, self.bootstrap)

    def against(self, a: RowKey, b: RowKey | None, metric: Metric, length: int) -> Estimate | None:
        """A statistic of `a` minus that of `b`, paired over windows; None where one is missing."""
        one = self._cell(a, metric, length)
        other = None if b is None else self._cell(b, metric, length)
        return (
            None if one is None or other is None else difference(one, other, metric, self.bootstrap)
        )

    def tax(self, row: RowKey) -> Estimate | None:
        """By how many percent the loss at the training length rises, paired over windows."""
        plain = self.plain
        if plain is None or row == plain:
            return None
        length = row.train_length
        base, found = (
            self.value(plain, TRAIN_LOSS, length),
            self.against(row, plain, TRAIN_LOSS, length),
        )
        return None if base is None or found is None else in_percent(found, base.value)

    def _cell(self, row: RowKey, metric: Metric, length: int) -> Cell | None:
        return self.cells.get(row, metric.protocol, length)


def in_percent(value: Estimate, whole_value: float) -> Estimate:
    """An estimate in percent of a value, which is taken as known."""
    scale = 100 / whole_value
    low, high = (None if end is None else end * scale for end in (value.low, value.high))
    return Estimate(value.value * scale, low, high, value.documents, value.tokens, value.seeds)


def _keys(units: Sequence[AnyUnit], method: str, length: int) -> list[KeyUnit]:
    """The pass keys that were asked for under a method at a length."""
    place = (method, length)
    return [u for u in units if isinstance(u, KeyUnit) and (u.method, u.length) == place]


def _cost(group: Sequence[TextUnit], keys: Sequence[KeyUnit]) -> Cost:
    peaks = [unit.peak_bytes for unit in group if unit.peak_bytes is not None]
    return Cost(
        prefill_seconds=statistics.median(unit.prefill_seconds for unit in group),
        peak_bytes=max(peaks, default=None),
        found=sum(unit.found for unit in keys),
        asked=len(keys),
    )
