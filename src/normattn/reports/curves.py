"""The points of the figures: accuracy by position, and against context length."""

from __future__ import annotations

import math
from dataclasses import dataclass

from normattn.reports.bootstrap import Bootstrap
from normattn.reports.cells import Cells, RowKey
from normattn.reports.metrics import METRICS, curve, estimate

POSITION_METRICS = ("non_repeated", "repeated")
LENGTH_METRIC = "last_segment"


@dataclass(frozen=True)
class Point:
    """Accuracy in % over the positions (or of the context lengths) `first` … `last`."""

    first: int
    last: int
    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Curve:
    """One line of a figure."""

    name: str
    variant: str
    method: str
    protocol: str
    train_length: int
    points: tuple[Point, ...]


def curves_by_position(cells: Cells, bootstrap: Bootstrap) -> list[Curve]:
    """Accuracy by position of the scored token, one curve per row and protocol.

    Positions count from 1 (the number of tokens that the model has read); bins are the records'.
    """
    found = []
    for key in POSITION_METRICS:
        metric = METRICS[key]
        for row in cells.rows:
            cell = cells.get(row, metric.protocol)
            if cell is not None:
                ends = zip(*curve(cell, metric, bootstrap), strict=True)
                bins = zip(cell.edges, cell.edges[1:], ends, strict=False)
                points = tuple(
                    Point(first + 1, last, *(_rounded(float(v)) for v in values))
                    for first, last, values in bins
                    if not math.isnan(values[0])
                )
                found.append(_curve(row, metric.protocol, points))
    return found


def curves_by_length(cells: Cells, bootstrap: Bootstrap) -> list[Curve]:
    """Accuracy on one fixed last segment, against the length of the context that ends with it."""
    metric, found = METRICS[LENGTH_METRIC], []
    for row in cells.rows:
        points = []
        for length in cells.lengths(row, metric.protocol):
            cell = cells.get(row, metric.protocol, length)
            value = None if cell is None else estimate(cell, metric, bootstrap)
            if value is not None:
                points.append(Point(length, length, value.value, value.low, value.high))
        if points:
            found.append(_curve(row, metric.protocol, tuple(points)))
    return found


def _curve(row: RowKey, protocol: str, points: tuple[Point, ...]) -> Curve:
    return Curve(row.name, row.variant, row.method, protocol, row.train_length, points)


def _rounded(value: float) -> float:
    return round(value, 9) + 0.0
