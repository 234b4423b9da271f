"""Write the files of a report; equal contexts give equal bytes.

`report.html` is self-contained and needs no network. `table.md` has the main columns, `table.json`
and a CSV for each table are for programs, and `measurements.parquet` makes all of them again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import get_args

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
    earlier = set[Path]()
    with suppress(OSError, ValueError, KeyError, TypeError):  # table.json names its tables
        tables = json.loads((out / "table.json").read_text("utf-8"))["tables"]
        files = [out / f"{key}.csv" for key in tables]
        earlier = {*(f for f in files if f.parent == out), *(out / FIGURES).glob("*.png")}
    for outdated in earlier - texts.keys() - images.keys():
        outdated.unlink(missing_ok=True)
    for path, text in texts.items():
        write_text(path, text)
    for path, image in images.items():
        write_bytes(path, image)
    return Written(page.summary, tuple(images))


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
    rows = []
    for finding in findings:
        claim, difference, decided = finding.claim, finding.difference, finding.remark
        if not title:
            decided = f"**{finding.verdict}**" + (f" ({decided})" if decided else "")
        texts = [finding.probability, str(len(difference.seeds) or "–"), decided]
        texts += [claim.measured, claim.source]
        rows.append((Cell(claim.sentence), Cell(finding.size, difference), *map(Cell, texts)))
    columns = tuple(Column(name, name) for name in names)
    return FilledTable(key, title, "", (), columns, (), tuple(rows))


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
    content = {"tables": {table.key: table.records() for table in page.tables}, "claims": claims}
    return json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def page_html(page: PageContext) -> str:
    """The text of report.html, with its styles, scripts and charts."""
    from normattn.lab.report import charts  # Altair is slow to import.

    # Claims by verdict, untested ones last; none where no claim was tested.
    groups: dict[str, list[Finding]] = {verdict: [] for verdict in (*get_args(Verdict), UNTESTED)}
    for finding in page.findings:
        groups[finding.verdict if finding.p is not None else UNTESTED].append(finding)
    if len(groups[UNTESTED]) == len(page.findings):
        groups = {}
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
        findings=[
            _claims_table(group, f"claims-{re.sub('[^a-z]+', '-', verdict)}", verdict)
            for verdict, group in groups.items()
            if group
        ],
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

    # The snippet makes the bundled code available to the scripts of the report.
    return Markup(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;"))
