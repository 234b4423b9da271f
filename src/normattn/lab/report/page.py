"""A study's page as a value, and the files that it becomes over a frame."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from normattn.errors import InputError
from normattn.io import write_bytes, write_text
from normattn.lab.report.claim import Claim, decide, verdicts_in_short
from normattn.lab.report.context import PageContext
from normattn.lab.report.figure import Figure, named
from normattn.lab.report.markdown import page_json, page_markdown, table_csv
from normattn.lab.report.seeds import seeds_line
from normattn.lab.report.table import Filled, Table, span
from normattn.lab.report.view import View
from normattn.lab.stats import Bootstrap, measurements

FEW_UNITS = 20


def nothing(view: View) -> tuple[()]:
    """No claim, no figure, no note."""
    return ()


@dataclass(frozen=True)
class Page:
    """What a study shows: its tables, claims and figures, each a function of the frame."""

    title: str
    question: str
    sources: tuple[str, ...]
    tables: tuple[Table, ...]
    claims: Callable[[View], Sequence[Claim]] = nothing
    figures: Callable[[View], Sequence[Figure]] = nothing
    notes: Callable[[View], Sequence[str]] = nothing
    summary: Callable[[View], Sequence[str]] = nothing


def context(
    page: Page,
    measured: pl.DataFrame,
    settings: Mapping[str, str] | None = None,
    command: str = "",
    bootstrap: Bootstrap | None = None,
) -> PageContext:
    """Everything that stands on the page; raises `InputError` where nothing was measured."""
    if not measured.height:
        raise InputError("there is nothing to report: nothing was measured")
    view = View(measured, bootstrap or Bootstrap())
    tables = [table.fill(view) for table in page.tables]
    findings = tuple(decide(page.claims(view), view))
    return PageContext(
        title=page.title,
        question=page.question,
        sources=page.sources,
        settings=settings or {},
        tables=tuple(table for table in tables if table.rows),
        summary=(*page.summary(view), *verdicts_in_short(findings)),
        findings=findings,
        figures=named(page.figures(view)),
        notes=(*page.notes(view), *_diverged(view)),
        provenance=_provenance(view, tables),
        command=command,
    )


@dataclass(frozen=True)
class Written:
    """What the terminal says of a report: its "In short" sentences and its figures' files."""

    summary: tuple[str, ...]
    figures: tuple[Path, ...]


def write_page(made: PageContext, measured: pl.DataFrame, out: Path) -> Written:
    """Write the report's files and its measurements table.

    The same table gives the same numbers: no date, time or path.
    """
    measurements.write(out / measurements.FILE, measured)
    return write_files(made, out)


def write_files(made: PageContext, out: Path) -> Written:
    """Write table.md, table.json, a CSV of each table, report.html and figures/."""
    # Drawing is slow to import and not needed for the numbers.
    from normattn.lab.report.charts import png
    from normattn.lab.report.html import page_html

    write_text(out / "table.md", page_markdown(made))
    write_text(out / "table.json", page_json(made))
    for table in made.tables:
        write_text(out / f"{table.key}.csv", table_csv(table))
    write_text(out / "report.html", page_html(made))
    paths = []
    for figure in made.figures:
        paths.append(out / "figures" / f"{figure.name}.png")
        write_bytes(paths[-1], png(figure))
    return Written(made.summary, tuple(paths))


def _provenance(view: View, tables: Sequence[Filled]) -> dict[str, str]:
    printed = [cell.estimate for table in tables for line in table.cells for cell in line]
    estimates = [estimate for estimate in printed if estimate is not None and estimate.units > 1]
    bootstrap = view.bootstrap
    facts = {
        "intervals": f"{bootstrap.level:.0%}, from {bootstrap.resamples} bootstrap resamples of "
        "the units and the spread of the seeds (Satterthwaite's t); differences are paired over "
        "both",
    }
    if estimates:
        units = sorted({estimate.units for estimate in estimates})
        facts["units behind a number"] = span(units) + (
            f"; intervals of fewer than {FEW_UNITS} are not reliable" * (units[0] < FEW_UNITS)
        )
    facts["seeds"] = seeds_line(view.frame)
    splits = ", ".join(sorted(view.values("split")))
    facts["measured on"] = f"{splits} data, digests " + ", ".join(
        sorted({digest[:12] for digest in view.values("data") if digest})
    )
    return facts


def _diverged(view: View) -> list[str]:
    """A sentence for every training that ended in NaN."""
    rows = view.frame.filter(pl.col("statistic") == "diverged").sort("row", "seed", "bin")
    return [
        f"{_training(row)}: diverged at step {row['bin']:.0f}; the first value that is not finite "
        f"came from {row['unit']}."
        for row in rows.unique(maintain_order=True).iter_rows(named=True)
    ]


def _training(row: Mapping[str, Any]) -> str:
    """Which training a row of the frame is about: its row, what else was varied, its seed."""
    varied = (
        f"{name.removeprefix(measurements.FACTOR).replace('_', ' ')} {value}"
        for name, value in row.items()
        if name.startswith(measurements.FACTOR) and value is not None
    )
    return ", ".join((row["row"], *varied, f"seed {row['seed']}"))
