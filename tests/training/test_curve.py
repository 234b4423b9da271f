"""A curve goes through its points, between two of them stays between them, and ends level."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from normattn.errors import InputError
from normattn.lab.training.curve import Curve

POSITIVE = st.floats(1e-3, 1e12)
POINTS = st.dictionaries(POSITIVE, POSITIVE, min_size=1, max_size=8).map(
    lambda points: sorted(points.items())
)
ANYWHERE = st.floats(0.0, math.inf)


@given(POINTS, ANYWHERE, ANYWHERE)
def test_it_is_monotone_and_between_its_ends(
    points: list[tuple[float, float]], one: float, other: float
) -> None:
    low, high = sorted((one, other))
    rising, falling = Curve.rising(points), Curve.falling(points)
    assert rising(low) <= rising(high)
    assert falling(low) >= falling(high)
    for curve in (rising, falling):
        ends = sorted((curve.points[0][1], curve.points[-1][1]))
        assert ends[0] <= curve(one) <= ends[1]
        assert curve(0.0) == curve.points[0][1]
        assert curve(math.inf) == curve.points[-1][1]


@given(POINTS)
def test_it_goes_through_its_points(points: list[tuple[float, float]]) -> None:
    """Through those that rise; one that does not is lifted to the highest before it."""
    curve = Curve.rising(points)
    highest = 0.0
    for x, y in points:
        highest = max(highest, y)
        assert curve(x) == pytest.approx(highest)


@given(st.floats(0.1, 10.0), st.floats(0.5, 4.0), st.floats(1.0, 1e6))
def test_a_power_is_a_straight_line(factor: float, power: float, x: float) -> None:
    curve = Curve.rising([(1.0, factor), (1e6, factor * 1e6**power)])
    assert curve(x) == pytest.approx(factor * x**power)


@pytest.mark.parametrize(
    ("points", "said"),
    [
        ((), "positive numbers"),
        (((1.0, 0.0),), "positive numbers"),
        (((1.0, math.inf),), "positive numbers"),
        (((1.0, math.nan),), "positive numbers"),
        (((2.0, 1.0), (1.0, 2.0)), "stand in order"),
        (((1.0, 1.0), (1.0, 2.0)), "stand in order"),
        (((1.0, 1.0), (2.0, 3.0), (3.0, 2.0)), "rises or falls"),
    ],
)
def test_what_is_no_curve_is_refused(points: tuple[tuple[float, float], ...], said: str) -> None:
    with pytest.raises(InputError, match=said):
        Curve(points)


def test_a_level_one_is_the_same_everywhere() -> None:
    assert {Curve.level(3.0)(x) for x in (0.0, 1.0, 1e9, math.inf)} == {3.0}
