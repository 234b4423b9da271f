"""Write the files of a report.

- `report.html`: for reading. It is self-contained, with the Vega code that draws its figures, and
  needs no network.
- `table.md`: the main columns, for a repository.
- `table.json`, and a CSV for each table: for programs.
- `measurements.parquet`: for regenerating all of them.

Equal contexts give equal bytes.
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
from normattn.lab.report.claims import Finding, Verdict, explain_verdicts
from normattn.lab.report.page import PageContext
from normattn.lab.report.tables import Cell, Column, FilledTable
from normattn.lab.stats import measurements

FIGURES = "figures"
UNTESTED = "not tested"
VEGA_SNIPPET = "window.vegaEmbed = vegaEmbed;"
"""Makes the bundled Vega code available to the scripts of the report."""


@dataclass(frozen=True)
class Written:
    """A written report: its "In short" sentences and the files of its figures."""

    summary: tuple[str, ...]
    figures: tuple[Path, ...]


def write_page(page: PageContext, out: Path, measured: pl.DataFrame | None = None) -> Written:
    """Write table.md, table.json, a CSV for each table, report.html and figures/.

    `measured` also goes to measurements.parquet. Outdated tables and figures are removed.
    """
    from normattn.lab.report import charts  # Altair is slow to import.

    if measured is not None:
        measurements.write(out / measurements.FILE, measured)
    texts = {out / f"{table.key}.csv": table.csv() for table in page.tables}
    texts[out / "table.md"], texts[out / "table.json"] = page_markdown(page), page_json(page)
    texts[out / "report.html"] = page_html(page)
    images = {out / FIGURES / f"{f.name}.png": charts.png(f) for f in page.figures}
    for outdated in _earlier_files(out) - texts.keys() - images.keys():
        outdated.unlink(missing_ok=True)
    for path, text in texts.items():
        write_text(path, text)
    for path, image in images.items():
        write_bytes(path, image)
    return Written(page.summary, tuple(images))


def _earlier_files(out: Path) -> set[Path]:
    """The files of an earlier report: the tables that table.json names, and the figures."""
    try:
        tables = json.loads((out / "table.json").read_text("utf-8"))["tables"]
    except (OSError, ValueError, KeyError, TypeError):
        return set()
    files = (out / f"{key}.csv" for key in tables)
    return {*(file for file in files if file.parent == out), *(out / FIGURES).glob("*.png")}


def page_markdown(page: PageContext) -> str:
    """The text of table.md."""
    sources = f"Sources: {', '.join(page.sources)}." if page.sources else ""
    parts = [f"# {page.title}", page.question, sources]
    for table in page.tables:
        link = f"All columns: [{table.key}.csv]({table.key}.csv)." if table.hidden else ""
        title = f"## {table.title}" if table.title else ""
        notes = "\n".join(f"- {note}" for note in table.notes)
        parts += [title, table.intro, table.markdown(), link, notes]
    if page.findings:
        parts += ["## Claims", explain_verdicts(page.findings)]
        parts.append(_claims_table(page.findings, "claims").markdown())
    provenance = [f"- {name}: {value}" for name, value in page.provenance.items()]
    provenance += [f"- command: `{page.command}`"] if page.command else []
    parts += [*page.notes, "## How this was made", "\n".join(provenance)]
    return "\n\n".join(filter(None, parts)) + "\n"


def _claims_table(findings: Sequence[Finding], key: str, title: str = "") -> FilledTable:
    """A table of claims with verdicts, or with remarks where the verdict is the title."""
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
    return FilledTable(key, title, "", (), tuple(Column(name, name) for name in names), (), cells)


def page_json(page: PageContext) -> str:
    """The text of table.json: every number of the report."""
    claims = [
        {
            "claim": finding.claim.sentence,
            "source": finding.claim.source,
            "measured": finding.claim.measured,
            "difference": finding.difference.as_json(),
            "p": finding.p,
            "uncorrected": dict(finding.uncorrected),
            "verdict": finding.verdict,
        }
        for finding in page.findings
    ]
    content: dict[str, Any] = {
        "tables": {table.key: table.records() for table in page.tables},
        "claims": claims,
    }
    return json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def page_html(page: PageContext) -> str:
    """The text of report.html, with its styles, scripts and charts."""
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
        explanation=explain_verdicts(page.findings) if page.findings else "",
        figures=[figure.title for figure in page.figures],
        values={"charts": [*map(charts.vega_lite, page.figures)]},
        vega=_vega() if page.figures else "",
    )
    return text.rstrip() + "\n"


@cache
def _vega() -> Markup:
    """The code of Vega, Vega-Lite and vega-embed as one script; bundling takes a second."""
    import vl_convert

    return Markup(vl_convert.javascript_bundle(VEGA_SNIPPET))


def _by_verdict(findings: Sequence[Finding]) -> list[FilledTable]:
    """The claims by verdict, untested ones last; empty where no claim was tested."""
    groups: dict[str, list[Finding]] = {verdict: [] for verdict in (*get_args(Verdict), UNTESTED)}
    for finding in findings:
        groups[finding.verdict if finding.p is not None else UNTESTED].append(finding)
    if len(groups[UNTESTED]) == len(findings):
        return []
    return [
        _claims_table(group, f"claims-{re.sub('[^a-z]+', '-', verdict)}", verdict)
        for verdict, group in groups.items()
        if group
    ]
