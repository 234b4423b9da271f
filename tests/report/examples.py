"""A page that holds every kind of figure, a table and claims of each verdict."""

from __future__ import annotations

import math
from dataclasses import replace

from normattn.lab.report.claims import Claim, Finding, Verdict
from normattn.lab.report.figures import (
    Curves,
    Figure,
    Grid,
    IntervalColumn,
    Intervals,
    Line,
    Panel,
    Point,
)
from normattn.lab.report.page import PageContext
from normattn.lab.report.tables import EMPTY_CELL, Cell, Column, FilledTable, Row, format_estimate
from normattn.lab.stats import Estimate

ROWS = tuple(name + end for name in ("Baseline", "QNA", "KNA", "CosA") for end in ("", "-logn"))


def estimate(value: float) -> Estimate:
    """A value of three seeds with an interval of ±1.5."""
    return Estimate(value, value - 1.5, value + 1.5, 0.01, 200, 4000, (0, 1, 2), (value,) * 3)


def position_curves(rows: tuple[str, ...] = ROWS, panels: int = 2) -> Curves:
    """Lines that end close to each other, so that their labels would collide."""
    lines = tuple(
        Line(
            row,
            tuple(Point.of(8.0 + 16 * k, estimate(30 - k * 0.3 + 0.2 * place)) for k in range(8)),
            row.removesuffix("-logn"),
            row.endswith("-logn"),
        )
        for place, row in enumerate(rows)
    )
    made = [
        Panel(f"panel {n}", lines, "position", "accuracy (%)", train_length=64)
        for n in range(panels)
    ]
    return Curves("by_position", "Accuracy by position", tuple(made))


def length_curves() -> Curves:
    """Few points on logarithmic axes, one of them without a finite value."""
    points = [Point(64.0 * 2**k, 10.0 ** (k - 1)) for k in range(4)]
    points[2] = Point(points[2].x, math.nan)
    line = Line("Baseline", tuple(points))
    panel = Panel("", (line,), "context", "logit", log_x=True, log_y=True)
    return Curves("by_length", "Largest logit", (panel,))


def intervals() -> Intervals:
    """Two quantities; one row has none of them, one has no interval."""
    values = (*(estimate(float(place)) for place in range(6)), None, Estimate(3.0))
    columns = (IntervalColumn("median", values), IntervalColumn("change", values, zero=True))
    return Intervals("ranges", "Ranges", ROWS, columns)


def grid() -> Grid:
    """A cell without a value says why."""
    values = tuple(
        tuple(None if (r, c) == (1, 2) else 1.0 + r + 3 * c for c in range(3)) for r in range(8)
    )
    texts = tuple(tuple("NaN at 5" if v is None else f"{v:.1f}" for v in line) for line in values)
    return Grid("grid", "Loss", ROWS, ("0.1, 0", "0.2, 0", "0.3, 0"), values, texts)


def figures() -> tuple[Figure, ...]:
    bent = replace(intervals(), name="changes", symlog=0.5)
    return (position_curves(), length_curves(), intervals(), bent, grid())


def table(first: str = "Baseline") -> FilledTable:
    """Five rows whose order by text, by value and as written differ."""
    names = (first, "QNA", "KNA", "CosA", "Other")
    values = (9.0, 10.0, None, -2.0, 100.0)
    cells = tuple(
        (
            Cell(name),
            EMPTY_CELL if v is None else Cell(format_estimate(estimate(v)), estimate(v)),
            Cell("1"),
        )
        for name, v in zip(names, values, strict=True)
    )
    columns = (Column("row", "score"), Column("accuracy", "accuracy"), Column("seeds", "seeds"))
    rows = tuple(Row(name, {}) for name in names)
    return FilledTable("table", "Accuracy", "", ("a note",), columns, rows, cells, ("accuracy",))


def finding(verdict: Verdict, value: float, p: float | None) -> Finding:
    claim = Claim(f"a claim, {verdict}", None, "arXiv 2012.11747", "accuracy at 512", digits=1)
    return Finding(claim, estimate(value), p, verdict)


def page(name: str = "Baseline") -> PageContext:
    """Everything that a page can hold; `name` stands wherever a name can stand."""
    lines = position_curves((name, *ROWS[1:]))
    return PageContext(
        title=f"A study of {name}",
        question=f"What does {name} do?",
        summary=(f"{name} is summed up.",),
        sources=("kexue.fm/archives/9859", "arXiv 2012.11747", name),
        settings={"score": name, "steps": "30"},
        tables=(table(name),),
        findings=(
            finding("confirmed", 3.0, 0.004),
            finding("contradicted", -3.0, 0.02),
            finding("not confirmed", 0.1, 0.8),
            finding("inconclusive", 1.0, None),
        ),
        figures=(lines, *figures()[1:]),
        notes=(f"{name} diverged.",),
        provenance={"seeds": f"0, 1, 2 of {name}"},
        command=f"normattn reproduce keynorm --out {name}",
    )
