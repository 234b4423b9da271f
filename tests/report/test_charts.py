"""Charts hold the numbers of their figures, draw without a window and give equal values."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from normattn.lab.report.charts import png, vega_lite
from normattn.lab.report.figure import Curves, Figure, Line, Mark, Panel, Point

from . import examples


def data(chart: Any) -> Iterator[dict[str, Any]]:
    """Every data point of a specification."""
    if isinstance(chart, dict):
        values = chart.get("values")
        if isinstance(values, list):
            yield from (value for value in values if isinstance(value, dict))
        for inner in chart.values():
            yield from data(inner)
    elif isinstance(chart, list):
        for inner in chart:
            yield from data(inner)


def scales(chart: Any, name: str) -> Iterator[Any]:
    """The encoding channels of one name."""
    if isinstance(chart, dict):
        if isinstance(chart.get("encoding"), dict) and name in chart["encoding"]:
            yield chart["encoding"][name]
        for inner in chart.values():
            yield from scales(inner, name)
    elif isinstance(chart, list):
        for inner in chart:
            yield from scales(inner, name)


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
    chart = vega_lite(examples.position_curves())
    points = [point for point in data(chart) if point.get("line") == "CosA-logn"]
    assert {"line": "CosA-logn", "x": 504.0, "value": 22.1, "low": 20.6, "high": 23.6} in points
    colour = next(scales(chart, "color"))["scale"]
    assert colour["domain"] == list(examples.ROWS)
    by_name = dict(zip(colour["domain"], colour["range"], strict=True))
    assert by_name["KNA"] == by_name["KNA-logn"] != by_name["QNA"]
    dash = next(scales(chart, "strokeDash"))["scale"]["range"]
    assert dash[0] == [1, 0] != dash[1]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_left_out(bad: float) -> None:
    chart = vega_lite(one_panel(Point(1.0, bad, bad, bad), Point(2.0, 1.0, bad, 2.0)))
    points = [point for point in data(chart) if "value" in point]
    assert all(p == {"line": "a", "x": 2.0, "value": 1.0, "low": None, "high": 2.0} for p in points)
    assert points
    json.dumps(chart, allow_nan=False)


def test_a_plot_by_position_starts_at_a_quarter_of_the_training_length() -> None:
    marks = (Mark(128.0, "L"),)
    far = one_panel(Point(1.0, 1.0), Point(1024.0, 2.0), marks=marks)
    near = one_panel(Point(1.0, 1.0), Point(128.0, 2.0), marks=marks)
    assert next(scales(vega_lite(far), "x"))["scale"]["domainMin"] == 32.0
    assert "domainMin" not in next(scales(vega_lite(near), "x"))["scale"]


def test_a_wide_interval_does_not_stretch_the_axis() -> None:
    points = [Point(float(n), 1.0, 0.9, 1.1) for n in range(8)]
    wide = one_panel(*points, Point(8.0, 1.0, -100.0, 100.0))
    low, high = next(scales(vega_lite(wide), "y"))["scale"]["domain"]
    assert -1 < low < 0.9
    assert 1.1 < high < 3


def test_intervals_are_sorted_by_value() -> None:
    chart = vega_lite(examples.intervals())
    order = next(scales(chart, "y"))["sort"]
    values = {"Baseline": 0, "Baseline-logn": 1, "QNA": 2, "QNA-logn": 3, "KNA": 4, "KNA-logn": 5}
    known = [name for name in order if name in values]
    assert known == sorted(values, key=lambda name: -values[name])


def test_the_report_is_imported_without_altair() -> None:
    code = (
        "import sys, normattn.lab.report.charts, normattn.lab.report.html;"
        "assert 'altair' not in sys.modules and 'vl_convert' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
