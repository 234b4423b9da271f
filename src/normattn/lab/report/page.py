"""Make the values of a study's report from measurements; `output` writes them to files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import polars as pl

from normattn.errors import InputError
from normattn.lab.report.claims import Claim, Finding, decide, verdicts_in_short
from normattn.lab.report.figures import Figure, is_empty
from normattn.lab.report.tables import (
    FilledTable,
    Table,
    describe_seeds,
    factor_label,
    format_range,
)
from normattn.lab.report.view import View
from normattn.lab.stats.estimates import LEVEL, RESAMPLES
from normattn.lab.stats.measurements import FACTOR

FEW_UNITS = 20
"""The fewest units for a reliable interval."""


def no_lines(view: View) -> tuple[()]:
    """Return (), the default of a page's optional parts."""
    return ()


@dataclass(frozen=True)
class Page:
    """The content of a study's report, each part a function of the measurements."""

    title: str
    question: str
    sources: tuple[str, ...]
    tables: tuple[Table, ...]
    claims: Callable[[View], Sequence[Claim]] = no_lines
    figures: Callable[[View], Sequence[Figure]] = no_lines
    notes: Callable[[View], Sequence[str]] = no_lines
    summary: Callable[[View], Sequence[str]] = no_lines


@dataclass(frozen=True)
class PageContext:
    """All values of a report, before it is written. Only settings and `command` may hold a path."""

    title: str
    question: str = ""
    summary: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    tables: tuple[FilledTable, ...] = ()
    findings: tuple[Finding, ...] = ()
    figures: tuple[Figure, ...] = ()
    notes: tuple[str, ...] = ()
    provenance: Mapping[str, str] = field(default_factory=dict)
    command: str = ""


def context(
    page: Page,
    measured: pl.DataFrame,
    settings: Mapping[str, str] | None = None,
    command: str = "",
) -> PageContext:
    """Make the report of a page; raises `InputError` where nothing was measured."""
    if not measured.height:
        raise InputError("there is nothing to report: nothing was measured")
    view = View(measured)
    tables = tuple(table.fill(view) for table in page.tables)
    findings = tuple(decide(page.claims(view), view))
    return PageContext(
        title=page.title,
        question=page.question,
        sources=page.sources,
        settings=settings or {},
        tables=tuple(table for table in tables if table.rows),
        summary=(*page.summary(view), *verdicts_in_short(findings)),
        findings=findings,
        figures=tuple(figure for figure in page.figures(view) if not is_empty(figure)),
        notes=(*page.notes(view), *_diverged(view)),
        provenance=_provenance(view, tables),
        command=command,
    )


def _provenance(view: View, tables: Sequence[FilledTable]) -> dict[str, str]:
    cells = [cell.estimate for table in tables for line in table.cells for cell in line]
    units = sorted({estimate.units for estimate in cells if estimate and estimate.units > 1})
    facts = {
        "intervals": f"{LEVEL:.0%}, from {RESAMPLES} bootstrap resamples of the units and the "
        "spread of the seeds (Satterthwaite's t); differences are paired over both",
    }
    if units:
        warning = f"; intervals of fewer than {FEW_UNITS} are not reliable"
        facts["units per value"] = format_range(units) + warning * (units[0] < FEW_UNITS)
    digests = ", ".join(sorted({digest[:12] for digest in view.values("data") if digest}))
    facts["seeds"] = describe_seeds(view.frame)
    facts["measured on"] = f"{', '.join(sorted(view.values('split')))} data, digests {digests}"
    return facts


def _diverged(view: View) -> list[str]:
    """A sentence for each training that ended in NaN, with its row, factors and seed."""
    rows = view.frame.filter(pl.col("statistic") == "diverged").sort("row", "seed", "bin")
    sentences = []
    for row in rows.unique(maintain_order=True).iter_rows(named=True):
        factors = {name: value for name, value in row.items() if name.startswith(FACTOR)}
        varied = [f"{factor_label(n)} {value}" for n, value in factors.items() if value is not None]
        sentences.append(
            f"{', '.join([row['row'], *varied])}, seed {row['seed']}: diverged at step "
            f"{row['bin']:.0f}; the first value that is not finite came from {row['unit']}."
        )
    return sentences
