"""Charts hold the numbers of their figures, draw without a window and give equal values."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from normattn.lab.report.charts import png, vega_lite
from normattn.lab.report.figures import (
    Curves,
    Figure,
    Line,
    Panel,
    Point,
)

from . import examples


def parts(chart: Any) -> Iterator[dict[str, Any]]:
    """Every object of a specification, the whole first."""
    if isinstance(chart, dict):
        yield chart
        chart = list(chart.values())
    for inner in chart if isinstance(chart, list) else ():
        yield from parts(inner)


def data(chart: Any) -> list[dict[str, Any]]:
    """Every data point of a specification."""
    lists = (part["values"] for part in parts(chart) if isinstance(part.get("values"), list))
    return [value for values in lists for value in values if isinstance(value, dict)]


def channel(chart: Any, name: str) -> Any:
    """The first encoding channel of a name."""
    return next(part[name] for part in parts(chart) if isinstance(part.get(name), dict))


@cache
def positions() -> Any:
    return vega_lite(examples.position_curves())


def one_panel(*points: Point, **options: Any) -> Curves:
    panel = Panel("", (Line("a", points),), "x", "y", **options)
    return Curves("n", "t", (panel,))


@pytest.mark.parametrize("figure", examples.figures(), ids=lambda figure: figure.name)
def test_every_figure_is_drawn_and_repeats(figure: Figure) -> None:
    assert vega_lite(figure) == vega_lite(figure)
    image = png(figure)
    assert image.startswith(b"\x89PNG")
    assert len(image) > 4_000


def test_lines_hold_their_values_and_colours() -> None:
    chart = positions()
    points = [point for point in data(chart) if point.get("line") == "CosA-logn"]
    assert {"line": "CosA-logn", "x": 120.0, "value": 29.3, "low": 27.8, "high": 30.8} in points
    colour = channel(chart, "color")["scale"]
    assert colour["domain"] == list(examples.ROWS)
    by_name = dict(zip(colour["domain"], colour["range"], strict=True))
    assert by_name["KNA"] == by_name["KNA-logn"] != by_name["QNA"]
    dash = channel(chart, "strokeDash")["scale"]["range"]
    assert dash[0] == [1, 0] != dash[1]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_left_out(bad: float) -> None:
    chart = vega_lite(one_panel(Point(1.0, bad, bad, bad), Point(2.0, 1.0, bad, 2.0)))
    points = [point for point in data(chart) if "value" in point]
    assert all(p == {"line": "a", "x": 2.0, "value": 1.0, "low": None, "high": 2.0} for p in points)
    assert points
    json.dumps(chart, allow_nan=False)


def test_a_plot_by_position_starts_at_a_quarter_of_the_training_length() -> None:
    far = one_panel(Point(1.0, 1.0), Point(1024.0, 2.0), train_length=128)
    near = one_panel(Point(1.0, 1.0), Point(128.0, 2.0), train_length=128)
    assert channel(vega_lite(far), "x")["scale"]["domainMin"] == 32.0
    assert "domainMin" not in channel(vega_lite(near), "x")["scale"]


def test_a_wide_interval_does_not_stretch_the_axis() -> None:
    points = [Point(float(n), 1.0, 0.9, 1.1) for n in range(8)]
    wide = one_panel(*points, Point(8.0, 1.0, -100.0, 100.0))
    low, high = channel(vega_lite(wide), "y")["scale"]["domain"]
    assert -1 < low < 0.9
    assert 1.1 < high < 3


def test_intervals_are_sorted_by_value() -> None:
    chart = vega_lite(examples.intervals())
    order = channel(chart, "y")["sort"]
    values = {"Baseline": 0, "Baseline-logn": 1, "QNA": 2, "QNA-logn": 3, "KNA": 4, "KNA-logn": 5}
    known = [name for name in order if name in values]
    assert known == sorted(values, key=lambda name: -values[name])


def test_four_lines_that_end_far_apart_are_highlighted() -> None:
    chosen = next(part for part in parts(positions()) if "select" in part)
    ends = {line["line"] for line in chosen["value"]}
    assert len(ends) == 4
    assert {"Baseline", "CosA-logn"} <= ends
