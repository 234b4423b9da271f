"""The files of a report.

`report.html` is for reading, `table.md` with the main columns for a repository, `table.json` and a
CSV of each table for programs, `measurements.parquet` for making all of them again. report.html is
self-contained: it loads nothing and needs no network. Figures are Vega-Lite charts, drawn there by
the Vega code that the file carries. Equal contexts give equal bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_args

import polars as pl
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from normattn.io import write_bytes, write_text
from normattn.lab.report.claims import Finding, Verdict, explained
from normattn.lab.report.page import PageContext
from normattn.lab.report.tables import Cell, Column, Filled
from normattn.lab.stats import measurements

FIGURES = "figures"
UNTESTED = "not tested"
VEGA_SNIPPET = "window.vegaEmbed = vegaEmbed;"
"""The name that the bundle of Vega code gives to the scripts of the report."""


@dataclass(frozen=True)
class Written:
    """What the terminal prints of a report: its "In short" sentences and its figures' files."""

    summary: tuple[str, ...]
    figures: tuple[Path, ...]


def write_page(made: PageContext, out: Path, measured: pl.DataFrame | None = None) -> Written:
    """Write table.md, table.json, a CSV of each table, report.html, figures/ and measurements.

    The same measurements give the same numbers: no date, time or path. Tables and figures of an
    earlier report in `out` that this one lacks are removed.
    """
    from normattn.lab.report import charts  # Altair is slow to import.

    if measured is not None:
        measurements.write(out / measurements.FILE, measured)
    texts = {out / f"{table.key}.csv": table.csv() for table in made.tables}
    texts[out / "table.md"], texts[out / "table.json"] = page_markdown(made), page_json(made)
    texts[out / "report.html"] = page_html(made)
    images = {out / FIGURES / f"{f.name}.png": charts.png(f) for f in made.figures}
    for old in _of_earlier_report(out) - texts.keys() - images.keys():
        old.unlink(missing_ok=True)
    for path, text in texts.items():
        write_text(path, text)
    for path, image in images.items():
        write_bytes(path, image)
    return Written(made.summary, tuple(images))


def _of_earlier_report(out: Path) -> set[Path]:
    """The tables that table.json in `out` names, and the figures; no other file is the report's."""
    try:
        tables = json.loads((out / "table.json").read_text("utf-8"))["tables"]
    except (OSError, ValueError, KeyError, TypeError):
        return set()
    named = (out / f"{key}.csv" for key in tables)
    return {*(path for path in named if path.parent == out), *(out / FIGURES).glob("*.png")}


def page_markdown(page: PageContext) -> str:
    """table.md: equal contexts give equal bytes."""
    sources = f"Sources: {', '.join(page.sources)}." if page.sources else ""
    parts = [f"# {page.title}", page.question, sources]
    for table in page.tables:
        more = f"All columns: [{table.key}.csv]({table.key}.csv)." if table.hidden else ""
        title = f"## {table.title}" if table.title else ""
        notes = "\n".join(f"- {note}" for note in table.notes)
        parts += [title, table.intro, table.markdown(), more, notes]
    if page.findings:
        parts += ["## Claims, and what was found", explained(page.findings)]
        parts.append(_claims(page.findings, "claims").markdown())
    made = [f"- {name}: {value}" for name, value in page.provenance.items()]
    made += [f"- command: `{page.command}`"] if page.command else []
    parts += [*page.notes, "## How this was made", "\n".join(made)]
    return "\n\n".join(filter(None, parts)) + "\n"


def _claims(findings: Sequence[Finding], key: str, title: str = "") -> Filled:
    """A table of claims with their verdicts; under a verdict as its title, what limits each."""
    names = ["claim", "difference", "p", "seeds", "remark" if title else "verdict"]
    names += ["measured", "source"]
    cells = tuple(
        (
            Cell(finding.claim.sentence),
            Cell(finding.size, finding.difference),
            Cell(finding.probability),
            Cell(str(len(finding.difference.seeds) or "–")),
            Cell(finding.remark if title else finding.decided),
            Cell(finding.claim.measured),
            Cell(finding.claim.source),
        )
        for finding in findings
    )
    return Filled(key, title, "", (), tuple(Column(name, name) for name in names), (), cells)


def page_json(page: PageContext) -> str:
    """table.json: every number of the report."""
    claims = [
        {
            "claim": finding.claim.sentence,
            "source": finding.claim.source,
            "measured": finding.claim.measured,
            "difference": finding.difference.as_json(),
            "p": finding.p,
            "verdict": finding.verdict,
        }
        for finding in page.findings
    ]
    facts: dict[str, Any] = {"tables": {t.key: t.records() for t in page.tables}, "claims": claims}
    return json.dumps(facts, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def page_html(page: PageContext) -> str:
    """The report as one file of HTML, with its styles, its scripts and its charts."""
    from normattn.lab.report import charts  # Altair is slow to import.

    environment = Environment(
        loader=PackageLoader("normattn.lab.report"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=True,
    )
    compact = {"ensure_ascii": False, "allow_nan": False, "separators": (",", ":")}
    environment.policies["json.dumps_kwargs"] = compact
    text = environment.get_template("report.html.jinja").render(
        page=page,
        findings=_by_verdict(page.findings),
        explained=explained(page.findings) if page.findings else "",
        figures=[figure.title for figure in page.figures],
        values={"charts": [*map(charts.vega_lite, page.figures)]},
        vega=_vega() if page.figures else "",
    )
    return text.rstrip() + "\n"


@cache
def _vega() -> Markup:
    """The code of Vega, Vega-Lite and vega-embed as one script, which takes a second to make."""
    import vl_convert

    return Markup(vl_convert.javascript_bundle(VEGA_SNIPPET))


def _by_verdict(findings: Sequence[Finding]) -> list[Filled]:
    """The claims by verdict, the untested ones last; nothing where no claim was tested."""
    groups: dict[str, list[Finding]] = {verdict: [] for verdict in (*get_args(Verdict), UNTESTED)}
    for finding in findings:
        groups[finding.verdict if finding.p is not None else UNTESTED].append(finding)
    if len(groups[UNTESTED]) == len(findings):
        return []
    return [
        _claims(group, f"claims-{re.sub('[^a-z]+', '-', verdict)}", verdict)
        for verdict, group in groups.items()
        if group
    ]
