"""Images: stable bytes, labels that do not collide, nothing cut off, nothing imported early."""

from __future__ import annotations

import hashlib
import io
import pickle
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Drawn
from matplotlib.image import imread
from matplotlib.text import Text

from normattn.lab.report.figure import (
    Curves,
    Figure,
    Grid,
    IntervalColumn,
    Intervals,
    Line,
    Panel,
    Point,
)
from normattn.lab.report.figure_json import figure_json
from normattn.lab.report.palette import LINES, line_colour
from normattn.lab.report.plots import curves, density, draw, grid, intervals
from normattn.lab.report.plots.labels import spread
from normattn.lab.report.plots.style import house_style
from normattn.lab.stats import Estimate

from . import examples

KINDS = [
    pytest.param(figure, id=f"{n}-{figure.name}") for n, figure in enumerate(examples.figures())
]


@pytest.mark.parametrize("figure", KINDS)
def test_equal_figures_give_equal_bytes(figure: Figure) -> None:
    first = draw(figure)
    assert first == draw(figure)
    assert first.startswith(b"\x89PNG")


def test_another_process_and_other_settings_of_the_user_give_the_same_bytes(
    tmp_path: Path,
) -> None:
    kept = tmp_path / "figures"
    kept.write_bytes(pickle.dumps(examples.figures()))
    code = (
        "import hashlib, pickle, sys, matplotlib as mpl; mpl.rcParams['font.size'] = 20;"
        "from normattn.lab.report.plots import draw;"
        "figures = pickle.load(open(sys.argv[1], 'rb'));"
        "print(hashlib.sha256(b''.join(map(draw, figures))).hexdigest())"
    )
    told = subprocess.run(
        [sys.executable, "-c", code, str(kept)], capture_output=True, text=True, check=True
    )
    here = hashlib.sha256(b"".join(map(draw, examples.figures()))).hexdigest()
    assert told.stdout.strip() == here


def test_a_figure_of_other_numbers_is_another_image() -> None:
    assert draw(examples.position_curves()) != draw(examples.position_curves(panels=1))


def test_the_report_is_imported_without_matplotlib() -> None:
    code = (
        "import sys, normattn.lab.report, normattn.lab.report.plots, normattn.lab.report.html;"
        "assert 'matplotlib' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("lines", [1, 8, 24])
def test_labels_at_the_ends_of_lines_do_not_overlap(lines: int) -> None:
    names = tuple(f"a longer name {n}" for n in range(lines))
    figure = examples.position_curves(names, panels=3)
    with house_style():
        drawn = curves.plot(figure)
        canvas: Any = FigureCanvasAgg(drawn)
        canvas.draw()
        for axis in drawn.axes:
            # Text's own extent: an annotation's holds the line that joins it, too.
            texts = [text for text in axis.texts if text.get_text() in names]
            boxes = [Text.get_window_extent(text) for text in texts]
            assert len(boxes) == lines
            boxes.sort(key=lambda box: box.y0)
            assert all(upper.y0 >= lower.y1 - 0.5 for lower, upper in pairwise(boxes))
            others = [other for other in drawn.axes if other is not axis]
            assert not any(box.overlaps(other.bbox) for box in boxes for other in others)


WIDE = replace(examples.intervals(), rows=("Baseline+Muon+QK-Clip", 20 * "W", *examples.ROWS[2:]))

LOW = Grid(
    "low",
    "Few rows of many cells, in which nothing is written",
    ("Baseline", "KNA"),
    tuple(f"{number / 100:.2f}" for number in range(35, 75)),
    2 * (tuple(map(float, range(40))),),
    2 * (40 * ("",),),
    x_title="what the columns are",
    scale_title="mean log2 of attention received over uniform",
)


@pytest.mark.parametrize(
    "figure", [*KINDS, pytest.param(WIDE, id="wide letters"), pytest.param(LOW, id="low")]
)
def test_no_text_is_cut_off(figure: Figure) -> None:
    modules: dict[str, Any] = {
        "Curves": curves,
        "Intervals": intervals,
        "Grid": grid,
        "Density": density,
    }
    with house_style():
        drawn: Drawn = modules[type(figure).__name__].plot(figure)
        canvas: Any = FigureCanvasAgg(drawn)
        canvas.draw()
        box = drawn.get_tightbbox(canvas.get_renderer())
    width, height = drawn.get_size_inches()
    assert box.x0 >= 0
    assert box.y0 >= 0
    assert box.x1 <= width
    assert box.y1 <= height


def test_columns_of_one_kind_share_an_axis() -> None:
    """Linear within ± 0.1: 0, 0.1, 1 and 10 stand equally far apart, in both columns."""
    near, far = Estimate(-0.05, -0.1, 0.0), Estimate(5.0, 1.0, 10.0)
    columns = (IntervalColumn("after L", (near,)), IntervalColumn("after 2 L", (far,)))
    with house_style():
        drawn = intervals.plot(Intervals("changes", "", ("as is",), columns, 0.1))
        one, other = (
            axis.transLimits.transform(axis.transScale.transform([(x, 0) for x in (0, 0.1, 1, 10)]))
            for axis in drawn.axes
        )
    np.testing.assert_allclose(one, other)
    np.testing.assert_allclose(np.diff(one[:, 0], 2), 0, atol=1e-9)
    assert np.diff(one[:, 0]).min() > 0.1


def test_names_of_narrow_columns_do_not_overlap() -> None:
    with house_style():
        axis = grid.plot(LOW).axes[0]
    ticks = axis.get_xticks()
    names = [text.get_text() for text in axis.get_xticklabels()]
    assert names == [LOW.columns[int(tick)] for tick in ticks]
    inches = axis.get_position().width * axis.figure.get_size_inches()[0]  # type: ignore[union-attr]
    assert np.diff(ticks).min() * inches / len(LOW.columns) > 0.2


def test_first_families_keep_their_colours_whether_shown_or_not() -> None:
    def colours(*labels: str) -> dict[str, Any]:
        lines = tuple(Line(label, (Point(0.0, 1.0), Point(1.0, 2.0))) for label in labels)
        panel = Panel("", lines, "position", "accuracy (%)")
        figure = Curves("figure", "", (panel,), first=("Baseline", "QNA", "KNA"))
        with house_style():
            drawn = curves.plot(figure).axes[0].lines
        page = figure_json(figure)["panels"][0]["lines"]
        for line, shown in zip(drawn, page, strict=True):
            assert line.get_color() == LINES[shown["colour"]]
        return {label: line.get_color() for label, line in zip(labels, drawn, strict=True)}

    alone, together = colours("KNA", "window"), colours("Baseline", "QNA", "KNA")
    assert alone["KNA"] == together["KNA"] == LINES[2]
    assert alone["window"] not in together.values()


def test_families_share_a_colour_and_differ_by_dashes() -> None:
    with house_style():
        axis = curves.plot(examples.position_curves()).axes[0]
    lines = [line for line in axis.lines if len(line.get_xdata()) > 2]  # type: ignore[arg-type]
    colours = [line.get_color() for line in lines]
    assert colours[0::2] == colours[1::2]
    assert len(set(colours)) == 4
    assert all(
        a.get_linestyle() != b.get_linestyle() for a, b in zip(lines[::2], lines[1::2], strict=True)
    )


def test_the_image_has_ink_of_every_family() -> None:
    pixels = imread(io.BytesIO(draw(examples.position_curves())), format="png")
    red, green, blue = np.rint(255 * pixels[..., :3]).astype(int).reshape(-1, 3).T
    seen = set((red << 16 | green << 8 | blue).tolist())
    assert {0x000000, 0xE69F00, 0x0072B2, 0x009E73} <= seen


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ([0.5], [0.5]),
        ([0.5, 0.5], [0.45, 0.55]),
        ([0.0, 0.0, 0.9], [0.0, 0.1, 0.9]),
        ([1.0, 0.98], [1.0, 0.9]),
        ([0.2, 0.8, 0.25], [0.175, 0.8, 0.275]),
    ],
)
def test_labels_keep_their_order_and_a_gap(wanted: list[float], expected: list[float]) -> None:
    assert spread(wanted, 0.1, 0.0, 1.0) == pytest.approx(expected)


def test_labels_without_room_stand_evenly() -> None:
    assert spread([0.5] * 5, 0.4, 0.0, 1.0) == pytest.approx([0.0, 0.25, 0.5, 0.75, 1.0])


def test_a_band_wider_than_all_others_does_not_flatten_the_lines() -> None:
    def limits(*half: float) -> tuple[float, float]:
        lines = tuple(
            Line(
                f"{n}",
                tuple(Point(x, 20.0 + n, 20 + n - h, 20 + n + h) for x in (0.0, 1.0, 2.0, 3.0)),
            )
            for n, h in enumerate(half)
        )
        panel = Panel("", lines, "position", "accuracy (%)")
        axis = curves.plot(Curves("figure", "", (panel,))).axes[0]
        low, high = axis.get_ylim()
        return float(low), float(high)

    narrow = limits(2.0, 2.0, 2.0)
    assert narrow[0] < 18
    assert narrow[1] > 24
    low, high = limits(2.0, 2.0, 80.0)
    assert narrow[0] - 1 < low
    assert high < narrow[1] + 1
    wide = limits(80.0, 80.0, 2.0)
    # No value is below 0, so that the axis does not follow a band there.
    assert -10 < wide[0] <= 0
    assert wide[1] > 100


def test_the_first_familys_colour_is_its_own() -> None:
    colours = [line_colour(place) for place in range(40)]
    assert colours[: len(LINES)] == [*range(len(LINES))]
    assert max(colours) < len(LINES)
    assert colours.count(0) == 1
    assert all(one != other for one, other in pairwise(colours))
