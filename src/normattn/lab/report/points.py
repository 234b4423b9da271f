"""Points of a line from the frame: a metric bin by bin, or at several places."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

from normattn.lab.report.figure import Point
from normattn.lab.report.view import View
from normattn.lab.stats import Metric, by_bin, select
from normattn.lab.stats.arrays import Where

Bin = tuple[Any, ...]


def bin_points(
    view: View, metric: Metric, where: Where, x: Callable[[Bin], float]
) -> tuple[Point, ...]:
    """A point for every bin (layer, head, start, end) in which something was counted, at `x`."""
    sums = view.sums(metric.name, where)
    if sums is None:
        return ()
    values = by_bin(sums, metric, view.bootstrap)
    bins = zip(sums.bins, values, strict=True)
    return tuple(Point.of(float(x(bin_)), value) for bin_, value in bins if value is not None)


def points(view: View, metric: Metric, where: Iterable[tuple[float, Where]]) -> tuple[Point, ...]:
    """A point at every x whose rows were measured."""
    estimates = ((x, view.estimate(metric, at)) for x, at in where)
    return tuple(Point.of(float(x), value) for x, value in estimates if value is not None)


def octaves(view: View, metric: Metric, where: Where) -> list[tuple[int, str, tuple[float, float]]]:
    """The bins of a position between 0, L, 2 L, 4 L …: where each begins, its title, its span.

    Rows that were read to other lengths have other bins, so these are told by where they are.
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
