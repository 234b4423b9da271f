"""What stands on a page, before it is written as Markdown or HTML: values and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from normattn.lab.report.claim import Finding
from normattn.lab.report.figure import Figure
from normattn.lab.report.table import Filled


@dataclass(frozen=True)
class PageContext:
    """One study's report: question, summary, claims, tables and figures, and how it was made.

    `settings` and `provenance` are ordered mappings of text to text; equal contexts give equal
    bytes, so a date or a path stands on a page only where a study's value names it.
    """

    title: str
    question: str = ""
    summary: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    tables: tuple[Filled, ...] = ()
    findings: tuple[Finding, ...] = ()
    figures: tuple[Figure, ...] = ()
    notes: tuple[str, ...] = ()
    provenance: Mapping[str, str] = field(default_factory=dict)
    command: str = ""
