"""The page as HTML: well formed, self-contained, safe, and holding the numbers of its figures."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from normattn.lab.report.context import PageContext
from normattn.lab.report.figure import Curves, Line, Panel, Point
from normattn.lab.report.figure_json import figure_json
from normattn.lab.report.html import embedded, page_html
from normattn.lab.report.palette import LINES, ON_DARK
from normattn.lab.report.table import Cell
from normattn.lab.stats import Estimate

from . import examples

HOSTILE = "</script><script>alert('1')</script><img src=x onerror=alert(2)>\"&{{ 7*7 }}"
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


def test_equal_contexts_give_equal_bytes() -> None:
    assert page_html(examples.page()) == page_html(examples.page())


def test_the_page_is_well_formed_and_says_everything() -> None:
    parsed = Parsed(page_html(examples.page()))
    text = " ".join(parsed.text)
    for said in (
        *("A study of Baseline", "What does Baseline do?", "4 claims", "Holm", "a note"),
        *("found", "the opposite", "not found", "too little data", "Baseline diverged."),
        *("0, 1, 2 of Baseline", "normattn reproduce keynorm --out Baseline", "9.0", "[7.5, 10.5]"),
    ):
        assert said in text
    identifiers = [attrs["id"] for _, attrs in parsed.elements if "id" in attrs]
    assert len(identifiers) == len(set(identifiers))
    targets = [a["href"] for a in parsed.all("a")]
    assert {t[1:] for t in targets if t and t.startswith("#")} <= set(identifiers)
    assert len(parsed.all("figure")) == len(examples.page().figures)


def test_an_empty_page_is_a_page() -> None:
    parsed = Parsed(page_html(PageContext("Nothing yet")))
    assert not parsed.all("table")
    assert not parsed.all("figure")


def test_nothing_is_loaded() -> None:
    text = page_html(examples.page())
    parsed = Parsed(text)
    anchors = {a["href"] for a in parsed.all("a")}
    assert {t for t in anchors if t and not t.startswith("#")} == {
        "https://kexue.fm/archives/9859",
        "https://arxiv.org/abs/2012.11747",
    }
    assert not {"link", "img", "iframe", "object"} & {name for name, _ in parsed.elements}
    assert not any("src" in attrs for _, attrs in parsed.elements)
    without = re.sub(r'<a href="https://[^"]*"', "", text)
    assert not re.search(
        r"https?:|//[a-z]|url\(|@import", re.sub(r"(?m)^\s*//.*$| // .*$", "", without)
    )
    policy = next(m for m in parsed.all("meta") if m.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in (policy["content"] or "")


def test_names_cannot_become_elements() -> None:
    plain, hostile = Parsed(page_html(examples.page())), Parsed(page_html(examples.page(HOSTILE)))
    names = [name for name, _ in plain.elements]
    assert [name for name, _ in hostile.elements] == names
    assert HOSTILE in "".join(hostile.text)
    figures = json.loads(hostile.scripts[0])["figures"]
    assert figures[0]["panels"][0]["lines"][0]["label"] == HOSTILE
    assert hostile.scripts[1:] == plain.scripts[1:]


def test_the_embedded_figures_are_the_figures() -> None:
    page = examples.page()
    parsed = Parsed(page_html(page))
    values = json.loads(parsed.scripts[0])
    assert values["figures"] == json.loads(json.dumps([*map(figure_json, page.figures)]))
    lines = values["figures"][0]["panels"][1]["lines"]
    assert [line["label"] for line in lines] == list(examples.ROWS)
    assert [line["colour"] for line in lines] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert lines[7]["points"][31] == [504, 22.1, 20.6, 23.6]
    assert values["figures"][4]["values"][1] == [2, 5, None]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_null(bad: float) -> None:
    line = Line("a", (Point(1.0, bad, bad, bad), Point(2.0, 1.0)))
    values = figure_json(Curves("n", "t", (Panel("", (line,), "x", "y"),)))
    assert values["panels"][0]["lines"][0]["points"] == [[1, None, None, None], [2, 1, None, None]]


def test_numbers_keep_six_digits() -> None:
    line = Line("a", (Point(1234567.0, 0.123456789, -1e-9, 2.0),))
    values = figure_json(Curves("n", "t", (Panel("", (line,), "x", "y"),)))
    assert values["panels"][0]["lines"][0]["points"] == [[1234570, 0.123457, -1e-09, 2]]


def test_json_cannot_end_its_element() -> None:
    values = {"a": HOSTILE + "\u2028<!--"}
    text = str(embedded(values))
    assert not set(text) & set("<>&\u2028")
    assert json.loads(text) == values


def test_cells_are_sorted_by_their_value() -> None:
    parsed = Parsed(page_html(PageContext("t", tables=(examples.table(),))))
    assert [c.get("data-order") for c in parsed.all("td")] == ["9.0", "10.0", None, "-2.0", "100.0"]


@pytest.mark.parametrize(
    ("text", "order"),
    [
        *(("0.003", "0.003"), ("1,024", "1024.0"), ("-3", "-3.0"), ("1e-05", "1e-05")),
        *(("2 of 2", None), ("–", None), ("0, 1", None), ("×32", None), ("nan", None)),
    ],
)
def test_plain_numbers_are_sorted_as_numbers(text: str, order: str | None) -> None:
    filled = examples.table()
    lone = replace(filled, cells=((filled.cells[0][0], Cell(text)),))
    parsed = Parsed(page_html(PageContext("t", tables=(lone,))))
    assert [c.get("data-order") for c in parsed.all("td")] == [order]
    assert [c.get("class") for c in parsed.all("td")] == ["words" if order is None else None]


def test_a_page_without_numbers_is_small() -> None:
    assert len(page_html(PageContext("Nothing yet")).encode()) < 60_000


def test_both_grounds_have_a_colour_for_every_family() -> None:
    assert len(LINES) == len(ON_DARK) == len(set(LINES)) == len(set(ON_DARK)) == 12


def test_a_value_without_an_interval_says_so() -> None:
    filled = examples.table()
    cell = Cell("9.0 [no interval]", Estimate(9.0))
    lone = replace(filled, cells=((filled.cells[0][0], cell),))
    assert "[no interval]" in page_html(PageContext("t", tables=(lone,)))
