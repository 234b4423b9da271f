"""A study's report as a value, made from measurements; `output` writes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import polars as pl

from normattn.errors import InputError
from normattn.lab.report.claims import Claim, Finding, decide, verdicts_in_short
from normattn.lab.report.figures import Figure, is_empty
from normattn.lab.report.tables import Filled, Table, plain_factor, seeds_line, span
from normattn.lab.report.view import View
from normattn.lab.stats import Bootstrap
from normattn.lab.stats.measurements import FACTOR

FEW_UNITS = 20


def nothing(view: View) -> tuple[()]:
    """No claim, no figure, no note."""
    return ()


@dataclass(frozen=True)
class Page:
    """What a study shows: its tables, claims and figures, each a function of the measurements."""

    title: str
    question: str
    sources: tuple[str, ...]
    tables: tuple[Table, ...]
    claims: Callable[[View], Sequence[Claim]] = nothing
    figures: Callable[[View], Sequence[Figure]] = nothing
    notes: Callable[[View], Sequence[str]] = nothing
    summary: Callable[[View], Sequence[str]] = nothing


@dataclass(frozen=True)
class PageContext:
    """One report before it is written: values and nothing else.

    `settings` and `provenance` are ordered mappings of text to text; equal contexts give equal
    bytes, so there is no date, and a path only where a study's value names it.
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


def context(
    page: Page,
    measured: pl.DataFrame,
    settings: Mapping[str, str] | None = None,
    command: str = "",
    bootstrap: Bootstrap | None = None,
) -> PageContext:
    """Everything that a report holds; raises `InputError` where nothing was measured."""
    if not measured.height:
        raise InputError("there is nothing to report: nothing was measured")
    view = View(measured, bootstrap or Bootstrap())
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


def _provenance(view: View, tables: Sequence[Filled]) -> dict[str, str]:
    """How the numbers were made: intervals, units, seeds and data."""
    cells = [cell.estimate for table in tables for line in table.cells for cell in line]
    units = sorted({estimate.units for estimate in cells if estimate and estimate.units > 1})
    level, resamples = view.bootstrap.level, view.bootstrap.resamples
    facts = {
        "intervals": f"{level:.0%}, from {resamples} bootstrap resamples of the units and the "
        "spread of the seeds (Satterthwaite's t); differences are paired over both",
    }
    if units:
        few = f"; intervals of fewer than {FEW_UNITS} are not reliable" * (units[0] < FEW_UNITS)
        facts["units behind a number"] = span(units) + few
    digests = ", ".join(sorted({digest[:12] for digest in view.values("data") if digest}))
    facts["seeds"] = seeds_line(view.frame)
    facts["measured on"] = f"{', '.join(sorted(view.values('split')))} data, digests {digests}"
    return facts


def _diverged(view: View) -> list[str]:
    """A sentence for every training that ended in NaN: its row, what was varied, its seed."""
    rows = view.frame.filter(pl.col("statistic") == "diverged").sort("row", "seed", "bin")
    sentences = []
    for row in rows.unique(maintain_order=True).iter_rows(named=True):
        varied = [
            f"{plain_factor(name)} {value}"
            for name, value in row.items()
            if name.startswith(FACTOR) and value is not None
        ]
        training: list[Any] = [row["row"], *varied, f"seed {row['seed']}"]
        sentences.append(
            f"{', '.join(training)}: diverged at step {row['bin']:.0f}; the first value that is "
            f"not finite came from {row['unit']}."
        )
    return sentences
