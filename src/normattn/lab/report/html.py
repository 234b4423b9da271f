"""A report as one self-contained HTML file: it loads nothing and needs no network.

It opens with "In short" and the main figure. Tables sort and filter in the browser; figures are
Vega-Lite charts, drawn there by the Vega code that the file carries. Equal contexts give equal
bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from jinja2 import Environment
from markupsafe import Markup

from normattn.lab.report.charts import vega_lite
from normattn.lab.report.claim import Finding, Verdict, explained
from normattn.lab.report.context import PageContext
from normattn.lab.report.markdown import templates
from normattn.lab.report.table import Cell, Filled

_ADDRESS = re.compile(r"(?:https?://)?((?:[\w-]+\.)+[a-z]{2,}/[\w./?=&%#~+-]+)")
_PLAIN = re.compile(r"[-+]?\d[\d,]*(\.\d+)?(e[-+]?\d+)?")
UNTESTED = "not tested"
VEGA_SNIPPET = "window.vegaEmbed = vegaEmbed;"
"""What the bundle of Vega code leaves for the scripts of the report."""
_ARXIV = re.compile(r"arXiv[ :](\d{4}\.\d{4,5})")


@dataclass(frozen=True)
class HtmlCell:
    """A cell's value and what follows it in a smaller hand; `order` is what it is sorted by."""

    text: str
    interval: str = ""
    order: float | None = None


@dataclass(frozen=True)
class HtmlTable:
    """A table as the template writes it; the columns of `words` stand to the left."""

    key: str
    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[HtmlCell, ...], ...]
    words: tuple[int, ...] = (0,)
    more: tuple[int, ...] = ()
    intro: str = ""
    notes: tuple[str, ...] = ()


def page_html(page: PageContext) -> str:
    """The report as one file of HTML, with its styles, its scripts and its charts."""
    import vl_convert

    environment = templates(escape=True)
    return (
        environment.get_template("report.html.jinja")
        .render(
            page=page,
            sources=[_linked(source) for source in page.sources],
            tables=[_table(table, number) for number, table in enumerate(page.tables)],
            findings=_findings(page.findings),
            explained=explained(page.findings) if page.findings else "",
            figures=[figure.title for figure in page.figures],
            embedded=embedded({"charts": [*map(vega_lite, page.figures)]}),
            style=_verbatim(environment, "report.css"),
            vega=Markup(vl_convert.javascript_bundle(VEGA_SNIPPET)) if page.figures else "",
            scripts=[_verbatim(environment, name) for name in ("tables.js", "charts.js")],
        )
        .rstrip()
        + "\n"
    )


def embedded(values: Mapping[str, Any]) -> Markup:
    """The values as JSON that cannot end the element that it stands in."""
    text = json.dumps(values, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return Markup(text)


def _verbatim(environment: Environment, name: str) -> Markup:
    """A file that stands beside the templates, as it is."""
    assert environment.loader is not None
    return Markup(environment.loader.get_source(environment, name)[0].strip())


def _linked(source: str) -> Markup:
    """A source, as an anchor where it is an address or an arXiv number."""
    paper, address = _ARXIV.fullmatch(source), _ADDRESS.fullmatch(source)
    target = f"arxiv.org/abs/{paper[1]}" if paper else address[1] if address else ""
    if not target:
        return Markup.escape(source)
    return Markup('<a href="https://{}" rel="noreferrer">{}</a>').format(target, source)


def _table(table: Filled, number: int) -> HtmlTable:
    rows = tuple(tuple(map(_cell, line)) for line in table.cells)
    words = tuple(
        index
        for index in range(len(table.columns))
        if index == 0 or all(line[index].order is None for line in rows)
    )
    return HtmlTable(
        f"{table.key}-{number}",
        table.title or "Results",
        tuple(column.title for column in table.columns),
        rows,
        words,
        tuple(
            index
            for index, column in enumerate(table.columns)
            if table.main and index and column.key not in table.main
        ),
        table.intro,
        table.notes,
    )


def _cell(cell: Cell) -> HtmlCell:
    if cell.estimate is None:
        plain = _PLAIN.fullmatch(cell.text)
        return HtmlCell(cell.text, order=float(cell.text.replace(",", "")) if plain else None)
    value, bracket, interval = cell.text.partition(" [")
    return HtmlCell(value, f"[{interval}" if bracket else "", cell.sort_value)


def _findings(findings: Sequence[Finding]) -> list[tuple[str, HtmlTable]]:
    """The tested claims by verdict, each group as a table; the untested ones last."""
    groups: dict[str, list[Finding]] = {}
    for finding in findings:
        groups.setdefault(finding.verdict if finding.p is not None else UNTESTED, []).append(
            finding
        )
    order = [verdict for verdict in get_args(Verdict) if verdict in groups]
    names = [*order, *([UNTESTED] if UNTESTED in groups else [])]
    if names == [UNTESTED]:
        return []  # nothing was tested: no claims to show
    return [(name, _claims(name, groups[name])) for name in names]


def _claims(verdict: str, findings: Sequence[Finding]) -> HtmlTable:
    rows = []
    for finding in findings:
        value, bracket, interval = finding.size.partition(" [")
        seeds = len(finding.difference.seeds)
        rows.append(
            (
                HtmlCell(finding.claim.sentence),
                HtmlCell(value, f"[{interval}" if bracket else "", finding.difference.value),
                HtmlCell(finding.together),
                HtmlCell(finding.probability, order=finding.p),
                HtmlCell(str(seeds) if seeds else "–", order=float(seeds) or None),
                HtmlCell(finding.claim.measured, finding.remark),
                HtmlCell(finding.claim.source),
            )
        )
    head = ("claim", "difference", "simultaneous", "p", "seeds", "measured", "source")
    key = f"claims-{verdict.replace(' ', '-')}"
    return HtmlTable(key, verdict, head, tuple(rows), words=(0, 5, 6))
