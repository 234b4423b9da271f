"""The files of a report.

`report.html` is for reading, `table.md` for a repository, `table.json` and a CSV of each table for
programs, `measurements.parquet` for making all of them again. report.html is self-contained: it
loads nothing and needs no network. Tables sort and filter in the browser; figures are Vega-Lite
charts, drawn there by the Vega code that the file carries. Equal contexts give equal bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_args

import polars as pl
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from normattn.io import write_bytes, write_text
from normattn.lab.report import charts
from normattn.lab.report.claims import Finding, Verdict, explained
from normattn.lab.report.page import PageContext
from normattn.lab.report.tables import Cell, Filled, aligned
from normattn.lab.stats import measurements

_ADDRESS = re.compile(r"(?:https?://)?((?:[\w-]+\.)+[a-z]{2,}/[\w./?=&%#~+-]+)")
_ARXIV = re.compile(r"arXiv[ :](\d{4}\.\d{4,5})")
_NUMBER = re.compile(r"[-+]?\d[\d,]*(\.\d+)?(e[-+]?\d+)?")
UNTESTED = "not tested"
VEGA_SNIPPET = "window.vegaEmbed = vegaEmbed;"
"""What the bundle of Vega code leaves for the scripts of the report."""

HtmlCell = tuple[str, str, float | None]
"""Its text, what follows in a smaller hand, and the number that it is sorted by."""


@dataclass(frozen=True)
class HtmlTable:
    """A table as the template writes it.

    The columns of `words` are aligned to the left, those of `more` are behind a switch.
    """

    key: str
    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[HtmlCell, ...], ...]
    words: tuple[int, ...]
    more: tuple[int, ...] = ()
    intro: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Written:
    """What the terminal says of a report: its "In short" sentences and its figures' files."""

    summary: tuple[str, ...]
    figures: tuple[Path, ...]


def write_page(made: PageContext, measured: pl.DataFrame, out: Path) -> Written:
    """Write the report's files and its measurements.

    The same measurements give the same numbers: no date, time or path.
    """
    measurements.write(out / measurements.FILE, measured)
    return write_files(made, out)


def write_files(made: PageContext, out: Path) -> Written:
    """Write table.md, table.json, a CSV of each table, report.html and figures/."""
    write_text(out / "table.md", page_markdown(made))
    write_text(out / "table.json", page_json(made))
    for table in made.tables:
        write_text(out / f"{table.key}.csv", table.csv())
    write_text(out / "report.html", page_html(made))
    paths = [out / "figures" / f"{figure.name}.png" for figure in made.figures]
    for path, figure in zip(paths, made.figures, strict=True):
        write_bytes(path, charts.png(figure))
    return Written(made.summary, tuple(paths))


def page_markdown(page: PageContext) -> str:
    """table.md: equal contexts give equal bytes."""
    template = templates(escape=False).get_template("table.md.jinja")
    text = template.render(page=page, findings=_findings_table, explained=explained)
    text = re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def templates(escape: bool) -> Environment:
    """The templates of reports; `escape` for HTML."""
    return Environment(
        loader=PackageLoader("normattn.lab.report"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=escape,
    )


def _findings_table(findings: Sequence[Finding]) -> str:
    head = ("claim", "source", "measured", "difference", "simultaneous", "seeds", "p", "verdict")
    lines = [
        (
            finding.claim.sentence,
            finding.claim.source,
            finding.claim.measured,
            finding.size,
            finding.together,
            str(len(finding.difference.seeds) or "–"),
            finding.probability,
            f"**{finding.verdict}**" + (f" ({finding.remark})" if finding.remark else ""),
        )
        for finding in findings
    ]
    return aligned(head, lines, left=(0, 1, 2, 7))


def page_json(page: PageContext) -> str:
    """table.json: every number of the report."""
    claims = [
        {
            "claim": finding.claim.sentence,
            "source": finding.claim.source,
            "measured": finding.claim.measured,
            "difference": finding.difference.as_json(),
            "simultaneous": finding.simultaneous,
            "p": finding.p,
            "verdict": finding.verdict,
        }
        for finding in page.findings
    ]
    facts: dict[str, Any] = {"tables": {t.key: t.records() for t in page.tables}, "claims": claims}
    return json.dumps(facts, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def page_html(page: PageContext) -> str:
    """The report as one file of HTML, with its styles, its scripts and its charts."""
    environment = templates(escape=True)
    assert environment.loader is not None
    files = {
        name: Markup(environment.loader.get_source(environment, name)[0].strip())
        for name in ("report.css", "tables.js", "charts.js")
    }
    text = environment.get_template("report.html.jinja").render(
        page=page,
        sources=[_linked(source) for source in page.sources],
        tables=[_table(table, number) for number, table in enumerate(page.tables)],
        findings=_by_verdict(page.findings),
        explained=explained(page.findings) if page.findings else "",
        figures=[figure.title for figure in page.figures],
        embedded=embedded({"charts": [*map(charts.vega_lite, page.figures)]}),
        style=files["report.css"],
        vega=_vega() if page.figures else "",
        scripts=[files["tables.js"], files["charts.js"]],
    )
    return text.rstrip() + "\n"


@cache
def _vega() -> Markup:
    """The code of Vega, Vega-Lite and vega-embed as one script, which takes a second to make."""
    import vl_convert

    return Markup(vl_convert.javascript_bundle(VEGA_SNIPPET))


def embedded(values: Mapping[str, Any]) -> Markup:
    """The values as JSON that cannot end the element that holds it."""
    text = json.dumps(values, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return Markup(text)


def _linked(source: str) -> Markup:
    """A source, as an anchor where it is an address or an arXiv number."""
    paper, address = _ARXIV.fullmatch(source), _ADDRESS.fullmatch(source)
    target = f"arxiv.org/abs/{paper[1]}" if paper else address[1] if address else ""
    if not target:
        return Markup.escape(source)
    return Markup('<a href="https://{}" rel="noreferrer">{}</a>').format(target, source)


def _table(table: Filled, number: int) -> HtmlTable:
    rows = tuple(tuple(map(_cell, line)) for line in table.cells)
    columns = range(len(table.columns))
    hidden = [table.main and column.key not in table.main for column in table.columns]
    return HtmlTable(
        key=f"{table.key}-{number}",
        title=table.title or "Results",
        head=tuple(column.title for column in table.columns),
        rows=rows,
        words=tuple(i for i in columns if i == 0 or all(line[i][2] is None for line in rows)),
        more=tuple(i for i in columns if i and hidden[i]),
        intro=table.intro,
        notes=table.notes,
    )


def _cell(cell: Cell) -> HtmlCell:
    if cell.estimate is None:
        number = float(cell.text.replace(",", "")) if _NUMBER.fullmatch(cell.text) else None
        return cell.text, "", number
    return *_split(cell.text), cell.estimate.value


def _split(text: str) -> tuple[str, str]:
    """The value and the interval of "36.7 [35.9, 37.5]"."""
    value, bracket, interval = text.partition(" [")
    return value, f"[{interval}" if bracket else ""


def _by_verdict(findings: Sequence[Finding]) -> list[HtmlTable]:
    """The tested claims by verdict, each group as a table; the untested ones last.

    Nothing where no claim was tested.
    """
    groups: dict[str, list[Finding]] = {verdict: [] for verdict in (*get_args(Verdict), UNTESTED)}
    for finding in findings:
        groups[finding.verdict if finding.p is not None else UNTESTED].append(finding)
    if len(groups[UNTESTED]) == len(findings):
        return []
    head = ("claim", "difference", "simultaneous", "p", "seeds", "measured", "source")
    return [
        HtmlTable(
            key=f"claims-{re.sub('[^a-z]+', '-', verdict)}",
            title=verdict,
            head=head,
            rows=tuple(map(_claim, group)),
            words=(0, 5, 6),
        )
        for verdict, group in groups.items()
        if group
    ]


def _claim(finding: Finding) -> tuple[HtmlCell, ...]:
    seeds = len(finding.difference.seeds)
    return (
        (finding.claim.sentence, "", None),
        (*_split(finding.size), finding.difference.value),
        (finding.together, "", None),
        (finding.probability, "", finding.p),
        (str(seeds or "–"), "", float(seeds) or None),
        (finding.claim.measured, finding.remark, None),
        (finding.claim.source, "", None),
    )
