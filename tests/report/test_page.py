"""Tables, claims and pages over small frames with known numbers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from measure.test_estimate import counted
from normattn.errors import InputError
from normattn.lab.report.claims import Claim, Finding, decide
from normattn.lab.report.figures import Curves, Figure, Line, Panel, Point
from normattn.lab.report.output import page_json, page_markdown, write_page
from normattn.lab.report.page import Page, context
from normattn.lab.report.tables import (
    EMPTY_CELL,
    Column,
    Row,
    Table,
    format_estimate,
    markdown_table,
)
from normattn.lab.report.view import View
from normattn.lab.stats import Estimate, Metric, concat, measurements
from undrawn import undraw

ACCURACY = Metric("accuracy")


def made(
    gap: float, seeds: int = 3, units: int = 40, noise: float = 1.0, start: int = 0
) -> pl.DataFrame:
    """B is `gap` points above A, document by document but for noise; also of seeds from a start."""
    generator = np.random.default_rng(start)
    rows = []
    for seed in range(seeds):
        base = generator.uniform(30, 50, units)
        shift = gap + generator.standard_normal() if start else gap
        change = shift + noise * generator.standard_normal(units)
        rows.append(counted("A", seed, base, np.full(units, 100.0)))
        rows.append(counted("B", seed, base + change, np.full(units, 100.0)))
    return concat(rows)


def claim(sign: int = 1, matters: float | None = None, margin: float = 0.0) -> Claim:
    gap = ACCURACY.at(variant="B") - ACCURACY.at(variant="A")
    return Claim("B is better", gap, "a paper", "B − A", sign, matters, margin)


@pytest.mark.parametrize(
    ("measured", "tested", "verdict"),
    [
        (made(5.0), claim(), "confirmed"),
        (made(-5.0), claim(), "contradicted"),
        (made(-5.0), claim(sign=-1), "confirmed"),
        (made(0.0, noise=3.0), claim(), "not confirmed"),
        (made(0.0, noise=30.0), claim(matters=0.5), "inconclusive"),
        (made(5.0, seeds=2), claim(), "inconclusive"),
        (made(5.0, units=1), claim(), "inconclusive"),
        # "As good as", by a margin: a little worse holds, worse by more is the opposite.
        (made(0.0), claim(margin=5.0), "confirmed"),
        (made(-1.0), claim(margin=5.0), "confirmed"),
        (made(-4.0), claim(margin=5.0), "confirmed"),
        (made(-4.9, noise=5.0), claim(margin=5.0), "differs (size unclear)"),
        (made(5.1, noise=5.0), claim(sign=-1, margin=5.0), "differs (size unclear)"),
        (made(-9.0), claim(margin=5.0), "contradicted"),
        (made(1.0), claim(sign=-1, margin=5.0), "confirmed"),
        (made(9.0), claim(sign=-1, margin=5.0), "contradicted"),
        (made(-2.0, noise=30.0), claim(margin=5.0), "not confirmed"),
        (made(-2.0, noise=30.0), claim(matters=1.0, margin=5.0), "inconclusive"),
        (made(0.0, seeds=2), claim(margin=5.0), "inconclusive"),
    ],
)
def test_the_verdicts(measured: pl.DataFrame, tested: Claim, verdict: str) -> None:
    (found,) = decide([tested], View(measured))
    assert found.verdict == verdict
    assert found.remark or verdict != "inconclusive"


def test_claims_of_a_page_are_corrected_together() -> None:
    # Alone the difference passes; among many that do not, it may no longer.
    measured = made(1.0, noise=1.0)
    alone = decide([claim()], View(measured))[0]
    assert alone.p is not None
    assert alone.p <= 0.05
    many = decide([claim(), *[claim(sign=-1)] * 30], View(measured))[0]
    assert many.p == pytest.approx(min(1.0, 31 * alone.p))
    assert many.verdict == "not confirmed"
    # Where smaller differences matter than the interval could show, that is too little data.
    undecided = decide([claim(matters=1e-6), *[claim(sign=-1)] * 30], View(measured))[0]
    assert undecided.verdict == "inconclusive"
    assert undecided.remark.startswith("smallest detectable effect ±")


def test_a_margin_errs_no_more_often_than_it_says() -> None:
    # The truth lies at the margin itself: "confirmed" is an error, on one side of the 5 %.
    views = (View(made(-5.0, units=20, start=start)) for start in range(1, 61))
    verdicts = [decide([claim(margin=5.0)], view)[0].verdict for view in views]
    assert verdicts.count("confirmed") <= 6  # 1.5 of 60 expected; more than 6 in 0.1 % by chance


def test_claims_that_cannot_be_tested_or_decide_for_themselves() -> None:
    view = View(made(1.0))
    assert decide([Claim("x", ACCURACY.at(variant="nobody"), "y", "z")], view) == []
    exact = Claim("x", source="y", test=lambda view: Estimate(3.0, p=0.01), sign=1)
    assert decide([exact], view)[0].verdict == "confirmed"


PAGE = Page(
    title="A | page",
    question="Which?",
    sources=("a paper",),
    tables=(
        Table(
            "table",
            "",
            lambda view: [Row(name, {"row": name}) for name in view.values("row")],
            (
                Column("accuracy", "accuracy", ACCURACY),
                Column("gap", "− A", ACCURACY - ACCURACY.at(variant="A")),
                Column("none", "never measured", ACCURACY.at(protocol="other")),
            ),
            notes=("a note",),
        ),
    ),
    claims=lambda view: [claim()],
    figures=lambda view: [curve(view)],
)


def curve(view: View) -> Figure:
    points = tuple(Point.of(float(n), view.estimate(ACCURACY, {"row": "A"})) for n in (1, 2))  # type: ignore[arg-type]
    return Curves("one", "One", (Panel("", (Line("A", points),), "x", "y"),))


def test_a_table_has_values_differences_and_no_empty_column() -> None:
    table = PAGE.tables[0].fill(View(made(5.0, noise=0.0)))
    assert [column.key for column in table.columns] == ["row", "accuracy", "gap"]
    assert table.cells[0][2] == EMPTY_CELL
    gap = table.cells[1][2].estimate
    assert gap is not None
    assert gap.value == pytest.approx(5.0)


def test_the_page_in_three_forms(tmp_path: Path) -> None:
    measured = made(5.0)
    page = context(PAGE, measured, {"training.steps": "5"}, "normattn reproduce x")
    text = page_markdown(page)
    assert text.startswith("# A | page\n\nWhich?\n")
    assert "| B " in text
    assert "**confirmed**" in text
    assert "- command: `normattn reproduce x`" in text
    facts = json.loads(page_json(page))
    assert facts["claims"][0]["verdict"] == "confirmed"
    assert facts["tables"]["table"][0]["gap"] is None
    assert page.tables[0].csv().splitlines()[0] == (
        "row,accuracy,accuracy_low,accuracy_high,gap,gap_low,gap_high"
    )
    write_page(page, tmp_path / "a", measured)
    write_page(page, tmp_path / "b", measurements.read(tmp_path / "a" / measurements.FILE))
    first, second = (
        {path.name: path.read_bytes() for path in sorted((tmp_path / name).rglob("*.*"))}
        for name in "ab"
    )
    assert first == second
    assert {"table.md", "table.csv", "table.json", "report.html", "one.png"} <= first.keys()
    with pytest.raises(InputError, match="nothing was measured"):
        context(PAGE, measurements.empty())


@pytest.mark.parametrize(
    ("statistic", "seeds"),
    [("loss", "0, 1, 2 of A, B"), ("diverged", "0, 1, 2 of A; 0, 1, 2, 3 of B")],
)
def test_a_model_not_read_is_no_seed_but_one_that_diverged_is(statistic: str, seeds: str) -> None:
    whole = made(5.0)
    last = whole.filter((pl.col("row") == "B") & (pl.col("seed") == 2)).head(1)
    trained = last.with_columns(seed=pl.lit(3, pl.Int64), protocol=pl.lit("training"))
    trained = trained.with_columns(statistic=pl.lit(statistic), bin=pl.lit(7.0))
    assert context(PAGE, concat([whole, trained.cast(last.schema)])).provenance["seeds"] == seeds


def test_what_a_report_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    undraw(monkeypatch)
    measured = made(5.0)
    page = context(PAGE, measured)
    other = replace(page.tables[0], key="other")
    figure = replace(page.figures[0], name="another")
    write_page(replace(page, tables=(*page.tables, other), figures=(figure,)), tmp_path)
    (tmp_path / "mine.csv").write_text("1")
    write_page(page, tmp_path)
    assert sorted(path.name for path in tmp_path.glob("*.csv")) == ["mine.csv", "table.csv"]
    assert [path.name for path in (tmp_path / "figures").iterdir()] == ["one.png"]


def test_numbers_in_tables() -> None:
    found = Estimate(1234.5678, 1.0, 2.0)
    assert format_estimate(found) == "1,234.6 [1.0, 2.0]"
    assert format_estimate(found, 2, signed=True) == "+1,234.57 [+1.00, +2.00]"
    assert format_estimate(found, interval=False) == "1,234.6"
    assert format_estimate(Estimate(1.0)) == "1.0"
    assert format_estimate(Estimate(0.0, 0.0, 0.0), signed=True) == "+0.0"
    assert format_estimate(None) == "–"
    words = [Finding(claim(), found, p, "confirmed").probability for p in (None, 0.0, 4e-4, 0.0214)]
    assert words == ["–", "<0.001", "<0.001", "0.021"]
    assert markdown_table(["a", "b"], [["x|y", "1"]]).splitlines()[2] == "| x\\|y | 1 |"


@pytest.mark.parametrize("value", [-0.0, -0.04, 0.04, -1e-12])
@pytest.mark.parametrize(("digits", "signed"), [(1, False), (1, True), (0, True)])
def test_what_rounds_to_zero_has_no_minus(value: float, digits: int, signed: bool) -> None:
    text = format_estimate(Estimate(value, -0.04, 0.04), digits, signed)
    assert "-" not in text
    zero = f"{'+' if signed else ''}{0:.{digits}f}"
    assert text == f"{zero} [{zero}, {zero}]"
    assert format_estimate(Estimate(-0.06), 1, interval=False) == "-0.1"
