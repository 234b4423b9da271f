"""The page as HTML: well formed, self-contained, safe, and holding the numbers of its figures."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser

from normattn.lab.report.output import page_html
from normattn.lab.report.page import PageContext

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
    parsed = Parsed(text)
    assert len(text.encode()) < 60_000
    assert not parsed.all("table")
    assert not parsed.all("figure")


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
    keys = [attrs.get("id") for attrs in Parsed(plain_page()).all("div") if attrs.get("id")]
    assert len([key for key in keys if key and key.startswith("claims-")]) == 4
    untested = tuple(finding for finding in page.findings if finding.p is None)
    assert untested
    text = page_html(replace(page, findings=untested, figures=()))
    assert 'id="claims"' not in text
