"""A measured curve: a rate by a size, between its points and beyond them."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from normattn.errors import InputError


@dataclass(frozen=True)
class Curve:
    """y(x) through `points` (x rising, x and y > 0), a straight line between two in log x, log y.

    Below the first point and above the last it is level. The points rise, or they fall, so the
    curve does: see `rising` and `falling`. Raises `InputError` for points that are no such thing.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        numbers = [number for point in self.points for number in point]
        if not numbers or not all(0.0 < number < math.inf for number in numbers):
            raise InputError(f"a curve takes points of two positive numbers, not {self.points}")
        if any(left >= right for (left, _), (right, _) in pairwise(self.points)):
            raise InputError(f"the points of a curve stand in order, not {self.points}")
        steps = [above - below for (_, below), (_, above) in pairwise(self.points)]
        if min(steps, default=0.0) < 0.0 < max(steps, default=0.0):
            raise InputError(f"a curve rises or falls, and does not do both: {self.points}")

    @classmethod
    def level(cls, y: float) -> Curve:
        """The same y for every x."""
        return cls(((1.0, y),))

    @classmethod
    def rising(cls, points: Iterable[tuple[float, float]]) -> Curve:
        """Through measured points; one that lies below an earlier one is lifted to it."""
        xs, ys = zip(*points, strict=True)
        return cls(tuple(zip(xs, accumulate(ys, max), strict=True)))

    @classmethod
    def falling(cls, points: Iterable[tuple[float, float]]) -> Curve:
        """Through measured points; one that lies above an earlier one is lowered to it."""
        xs, ys = zip(*points, strict=True)
        return cls(tuple(zip(xs, accumulate(ys, min), strict=True)))

    @cached_property
    def _xs(self) -> list[float]:
        return [x for x, _ in self.points]

    def __call__(self, x: float) -> float:
        """The curve at x ≥ 0, infinity included."""
        after = bisect_right(self._xs, x)
        if after in (0, len(self.points)):
            return self.points[max(after - 1, 0)][1]
        (left, low), (right, high) = self.points[after - 1 : after + 1]
        part = math.log(x / left) / math.log(right / left)
        between = low * math.exp(part * math.log(high / low))
        return min(max(between, min(low, high)), max(low, high))
