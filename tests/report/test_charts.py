"""Charts hold the numbers of their figures; pages are well formed, safe and drawn by Chromium."""

from __future__ import annotations

import html
import json
import math
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from normattn.lab.report.charts import png, vega_lite
from normattn.lab.report.figures import Curves, Figure, Intervals, Line, Panel, Point
from normattn.lab.report.output import page_html
from normattn.lab.report.page import PageContext

from . import examples


def parts(chart: Any) -> Iterator[dict[str, Any]]:
    """Every object of a specification, the whole first."""
    if isinstance(chart, dict):
        yield chart
        chart = list(chart.values())
    for inner in chart if isinstance(chart, list) else ():
        yield from parts(inner)


def data(chart: Any) -> list[dict[str, Any]]:
    lists = (part["values"] for part in parts(chart) if isinstance(part.get("values"), list))
    return [value for values in lists for value in values if isinstance(value, dict)]


def channel(chart: Any, name: str) -> Any:
    return next(part[name] for part in parts(chart) if isinstance(part.get(name), dict))


@cache
def positions() -> Any:
    return vega_lite(examples.position_curves())


def highlighted(chart: Any) -> set[str]:
    chosen = next(part for part in parts(chart) if "select" in part)
    return {line["line"] for line in chosen["value"]}


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
    ends = highlighted(positions())
    assert len(ends) == 4
    assert {"Baseline", "CosA-logn"} <= ends
    lines = [Line(str(n), (Point(1.0, n / 10), Point(2.0, n / 10))) for n in range(9)]
    lines[4] = Line("4", lines[4].points, control=True)
    curves = Curves("c", "c", (Panel("", tuple(lines), "x", "y"),))
    assert highlighted(vega_lite(curves)) == {"0", "2", "4", "8"}
    assert highlighted(vega_lite(replace(curves, featured=("5",)))) == {"0", "4", "5", "8"}


# The page as HTML.
BREAK = "document.title='broken'"
HOSTILE = f'</script><script>{BREAK}</script><img src=x onerror="{BREAK}">""&{{{{ 7*7 }}}}'
VOID = {"meta", "input", "link", "br", "img"}


class Parsed(HTMLParser):
    """The elements of a page in order, their nesting checked, and the text of each script."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
        elif not (self.open and self.open[-1] == "style"):
            self.text.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


@cache
def plain_page() -> str:
    return page_html(examples.page())


def test_the_page_is_well_formed_and_says_everything() -> None:
    parsed = Parsed(plain_page())
    text = " ".join(parsed.text)
    for said in (
        *("A study of Baseline", "What does Baseline do?", "In short", "Baseline is summed up."),
        *("Holm", "a note", "Not tested: 1", "Baseline diverged."),
        *("0, 1, 2 of Baseline", "normattn reproduce keynorm --out Baseline", "9.0", "[7.5, 10.5]"),
    ):
        assert said in text
    identifiers = [attrs["id"] for _, attrs in parsed.elements if "id" in attrs]
    assert len(identifiers) == len(set(identifiers))
    assert len(parsed.all("figure")) == len(examples.page().figures)


def test_an_empty_page_is_a_page() -> None:
    text = page_html(PageContext("Nothing yet"))
    assert len(text.encode()) < 60_000
    assert not {"table", "figure"} & {name for name, _ in Parsed(text).elements}


def test_nothing_is_loaded() -> None:
    parsed = Parsed(plain_page())
    assert not {"link", "img", "iframe", "object"} & {name for name, _ in parsed.elements}
    assert not any("src" in attrs for _, attrs in parsed.elements)
    policy = next(m for m in parsed.all("meta") if m.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in (policy["content"] or "")


def test_names_cannot_become_elements() -> None:
    plain, hostile = Parsed(plain_page()), Parsed(page_html(examples.page(HOSTILE)))
    names = [name for name, _ in plain.elements]
    assert [name for name, _ in hostile.elements] == names
    assert HOSTILE in "".join(hostile.text)
    charts = json.loads(hostile.scripts[0])["charts"]
    assert charts[0]["data"] if "data" in charts[0] else charts[0]["concat"]
    assert hostile.scripts[1:] == plain.scripts[1:]


def test_claims_are_grouped_by_verdict_and_hidden_where_none_was_tested() -> None:
    page = examples.page()
    keys = [attrs.get("id") or "" for attrs in Parsed(plain_page()).all("div")]
    assert len([key for key in keys if key.startswith("claims-")]) == 4
    untested = tuple(finding for finding in page.findings if finding.p is None)
    assert untested
    text = page_html(replace(page, findings=untested, figures=()))
    assert 'id="claims"' not in text


# The page opened in Chromium at two widths.
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)

FRAME = """<!DOCTYPE html>
<body style="margin: 0">
<iframe src="report.html" width="{width}" height="1500" style="border: 0"></iframe>
<script>
setInterval(() => {{
  const page = document.querySelector("iframe").contentDocument.documentElement;
  if (page.dataset.seen) document.documentElement.dataset.seen = page.dataset.seen;
}}, 50);
</script>
"""
PROBE = Path(__file__).with_name("probe.js")


def chromium(page: Path, width: int, *more: str) -> str:
    """What Chromium prints for a page in a window of some width, with a profile of its own."""
    if not CHROMIUM:
        pytest.skip("Chromium is not installed")
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={page.parent / f'profile{width}'}"]
    command += [f"--window-size={width},1600", *more, page.as_uri()]
    told = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert told.returncode == 0, told.stderr
    return told.stdout


@pytest.fixture(scope="module", params=[1280, 390])
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    page = tmp_path_factory.mktemp("page") / "report.html"
    text = page_html(examples.page())
    # An iframe has the wanted width even where the window cannot be made that narrow.
    probe = f"</title><script>{PROBE.read_text(encoding='utf-8')}</script>"
    page.write_text(text.replace("</title>", probe, 1), encoding="utf-8")
    frame = page.with_name("frame.html")
    frame.write_text(FRAME.format(width=request.param), encoding="utf-8")
    more = ("--allow-file-access-from-files", "--virtual-time-budget=60000", "--dump-dom")
    dom = chromium(frame, 1280, *more)
    match = re.search(r'data-seen="([^"]*)"', dom)
    assert match, dom[:2000]
    return json.loads(html.unescape(match[1]))


def test_the_report_draws_fits_and_shows_more_columns(seen: Any) -> None:
    figures = examples.page().figures
    assert seen["failures"] == []
    assert seen["overflow"] <= 0
    assert seen["numbers"] == 0
    assert len(seen["drawn"]) == len(figures)
    assert min(seen["drawn"]) >= 3
    # Panels stand below each other where they would not fit; a grid of cells may scroll.
    scrolled = zip(figures, seen["scrolled"], strict=True)
    assert all(by <= 0 for figure, by in scrolled if isinstance(figure, Curves | Intervals))
    assert seen["hidden"] == seen["shown"] == len(examples.table().rows) + 1


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text(page_html(examples.page(HOSTILE)), encoding="utf-8")
    dom = chromium(page, 1280, "--dump-dom")
    assert "<title>broken" not in dom
    assert "&lt;img src=x onerror=" in dom  # as text
    assert not re.search(r"<img src=.?x", re.sub(r'"[^"]*"', '""', dom))
