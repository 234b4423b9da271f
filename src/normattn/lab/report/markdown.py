"""A page as Markdown, and its tables as CSV and JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Sequence
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from normattn.lab.report.claim import Finding, explained
from normattn.lab.report.context import PageContext
from normattn.lab.report.table import Filled


def page_markdown(page: PageContext) -> str:
    """table.md: equal contexts give equal bytes."""
    template = templates(escape=False).get_template("table.md.jinja")
    text = template.render(
        page=page, grid=table_markdown, findings=findings_markdown, explained=explained
    )
    return _spaced(text)


def templates(escape: bool) -> Environment:
    """The templates of pages; `escape` for HTML."""
    return Environment(
        loader=PackageLoader("normattn.lab.report"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=escape,
    )


def table_markdown(table: Filled) -> str:
    """One table."""
    head = [column.title for column in table.columns]
    return aligned(head, [[cell.text for cell in line] for line in table.cells])


def findings_markdown(findings: Sequence[Finding]) -> str:
    """The claims and their verdicts."""
    head = ("claim", "source", "measured", "difference", "simultaneous", "seeds", "p", "verdict")
    lines = [
        (
            finding.claim.sentence,
            finding.claim.source,
            finding.claim.measured,
            finding.size,
            finding.together,
            str(len(finding.difference.seeds)) if finding.difference.seeds else "–",
            finding.probability,
            f"**{finding.verdict}**" + (f" ({finding.remark})" if finding.remark else ""),
        )
        for finding in findings
    ]
    return aligned(head, lines, left=(0, 1, 2, 7))


def aligned(head: Sequence[str], lines: Iterable[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """An aligned Markdown table; the columns of `left` to the left, the others to the right."""
    every = [[_escaped(text) for text in line] for line in (head, *lines)]
    widths = [max(len(line[index]) for line in every) for index in range(len(head))]

    def line(texts: Sequence[str]) -> str:
        parts = (
            text.ljust(width) if index in left else text.rjust(width)
            for index, (text, width) in enumerate(zip(texts, widths, strict=True))
        )
        return "| " + " | ".join(parts) + " |"

    rule = (
        "-" * width if index in left else "-" * (width - 1) + ":"
        for index, width in enumerate(widths)
    )
    return "\n".join([line(every[0]), "| " + " | ".join(rule) + " |", *map(line, every[1:])])


def table_csv(table: Filled) -> str:
    """A table with the ends of every interval; a column without numbers as text."""
    numeric = [
        any(line[index].estimate is not None for line in table.cells)
        for index in range(len(table.columns))
    ]
    head: list[str] = []
    for column, number in zip(table.columns, numeric, strict=True):
        head += [column.key + end for end in ("", "_low", "_high")] if number else [column.key]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(head)
    for cells in table.cells:
        line: list[Any] = []
        for cell, number in zip(cells, numeric, strict=True):
            estimate = cell.estimate
            if not number:
                line.append(cell.text)
            elif estimate is None:
                line += [""] * 3
            else:
                line += [
                    "" if v is None else v for v in (estimate.value, estimate.low, estimate.high)
                ]
        writer.writerow(line)
    return text.getvalue()


def page_json(page: PageContext) -> str:
    """table.json: every number of the page."""
    facts = {
        "tables": {
            table.key: [_row_json(table, n) for n in range(len(table.rows))]
            for table in page.tables
        },
        "claims": [
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
        ],
    }
    return json.dumps(facts, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _row_json(table: Filled, number: int) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for column, cell in zip(table.columns, table.cells[number], strict=True):
        estimate = cell.estimate
        row[column.key] = cell.text if estimate is None else estimate.as_json()
        if estimate is None and column.key != "row" and cell.text == "–":
            row[column.key] = None
    return row


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _spaced(text: str) -> str:
    """At most one empty line between paragraphs, one newline at the end."""
    lines: list[str] = []
    for line in text.splitlines():
        if line.strip() or (lines and lines[-1]):
            lines.append(line.rstrip())
    return "\n".join(lines).strip() + "\n"
