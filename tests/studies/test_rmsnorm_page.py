"""The norm study's page from a small frame: F1 by hand, ratios of times, verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import polars as pl
import pytest

from normattn.errors import InputError
from normattn.lab.evaluation.classification import Predictions, document_sums
from normattn.lab.report.claims import Finding
from normattn.lab.report.page import PageContext, context
from normattn.lab.report.tables import Cell
from normattn.lab.stats import Bootstrap, Identity, fact, identified, joined, sums
from normattn.lab.studies.rmsnorm import STUDY, timed

FEW = Bootstrap(resamples=300)
DOCUMENTS = 60
NOISE = np.random.default_rng(3)
SAME = tuple(NOISE.uniform(1.0, 1.02, 40))
"""What every round takes, but for the norm."""


def who(row: str, seed: int = 0, protocol: str = "classification", data: str = "d") -> Identity:
    return Identity("rmsnorm", row, row, seed, protocol, 0, 0, data=data)


def classified(row: str, seed: int = 0, wrong: int = 0, data: str = "d") -> pl.DataFrame:
    """Sixty documents of one of three labels; `wrong` of them are predicted to be the next."""
    true = np.eye(3)[np.arange(DOCUMENTS) % 3] > 0
    missed = np.arange(DOCUMENTS) < wrong
    said = np.where(missed[:, None], np.roll(true, 1, axis=1), true).astype(np.float32)
    loss = (0.1 + 0.01 * missed).astype(np.float32)
    names = [f"x{n:02}" for n in range(DOCUMENTS)]
    facts = {"parameters": 1000, "threshold": 0.4 + 0.1 * seed}
    return joined(
        [
            identified(
                who(row, seed, data=data), document_sums(Predictions(said, true, loss), 0.5, names)
            ),
            identified(
                who(row, seed, "training"),
                [fact(name, float(value)) for name, value in facts.items()],
            ),
        ]
    )


def trained(row: str, seed: int, early: float) -> pl.DataFrame:
    """Twenty steps of loss 1, the first two of `early`; looks at the development set at 10, 20."""
    steps = [
        sums("loss", [""], [[early if step < 3 else 1.0]], [[1.0]], axis="step", edges=[step])
        for step in range(1, 21)
    ]
    looks = [
        sums(name, [""], [[step / 100]], [[1.0]], axis="step", edges=[step])
        for step in (10, 20)
        for name in ("loss", "micro_f1", "macro_f1")
    ]
    at = who(row, seed, "training", data="")
    return joined(
        [
            identified(at, [*steps, fact("steps", 20.0)]),
            identified(replace(at, protocol="development"), looks),
        ]
    )


def rounds(row: str, seconds: Sequence[float] | np.ndarray) -> pl.DataFrame:
    said = "16 documents, fp32, cpu, 1 thread"
    return timed(
        replace(who(row, protocol="step time", data=""), settings=said), tuple(map(float, seconds))
    )


def steps(factor: float, spread: float = 0.004) -> list[pl.DataFrame]:
    """RMSNorm takes `factor` times as long in every round, but for noise."""
    own = np.random.default_rng(5).normal(1, spread, len(SAME))
    return [rounds("LayerNorm", SAME), rounds("RMSNorm", factor * own * np.asarray(SAME))]


def page(*parts: pl.DataFrame) -> PageContext:
    return context(STUDY.page, joined(parts), bootstrap=FEW)


def line(made: PageContext, row: str) -> dict[str, Cell]:
    (table,) = made.tables
    cells = next(cells for cells in table.cells if cells[0].text == row)
    return {column.key: cell for column, cell in zip(table.columns, cells, strict=True)}


def finding(made: PageContext, measured: str) -> Finding:
    (found,) = [each for each in made.findings if measured in each.claim.measured]
    return found


def models(wrong: int, seeds: Sequence[int] = (0, 1, 2)) -> list[pl.DataFrame]:
    """Both norms with each seed; RMSNorm errs in `wrong` and a few more of the documents."""
    return [
        each
        for seed in seeds
        for each in (
            classified("LayerNorm", seed, 15 + seed),
            classified("RMSNorm", seed, wrong + seed),
        )
    ]


def test_differences_are_paired_and_decided() -> None:
    made = page(*models(wrong=40))
    assert finding(made, "micro F1").verdict == "confirmed"
    assert finding(made, "micro F1").difference.value == pytest.approx(-100 * 25 / DOCUMENTS)
    assert finding(made, "macro F1").verdict == "confirmed"
    assert finding(made, "test loss").verdict == "confirmed"
    assert finding(made, "test loss").difference.value == pytest.approx(
        1000 * 0.01 * 25 / 60, rel=1e-5
    )
    better = page(*models(wrong=0))
    assert finding(better, "micro F1").verdict == "contradicted"
    assert finding(better, "test loss").verdict == "contradicted"
    same = page(*models(wrong=15))
    assert (same.findings[0].difference.low, same.findings[0].difference.high) == (0, 0)
    close = page(*models(wrong=17))
    assert finding(close, "test loss").verdict == "not confirmed"
    near = finding(close, "micro F1")
    # An interval wider than what the source found decides nothing.
    assert near.verdict == "inconclusive"
    assert near.remark.startswith("smallest detectable effect ±")
    few = finding(page(*models(wrong=40, seeds=(0, 1))), "micro F1")
    assert few.verdict == "inconclusive"
    assert few.remark == "2 seeds on both sides; 3 are needed"


def test_only_the_seeds_of_both_norms_are_compared() -> None:
    made = page(*models(wrong=15), classified("RMSNorm", 5, wrong=60))
    assert finding(made, "micro F1").difference.value == 0
    alone = page(classified("RMSNorm"))
    assert alone.findings == ()


def test_a_ratio_of_times_is_paired_by_round() -> None:
    drift = np.linspace(1, 5, 40)
    own = np.random.default_rng(5).normal(0.9, 0.004, 40)
    made = page(rounds("LayerNorm", drift), rounds("RMSNorm", own * drift))
    found = finding(made, "median time of a step")
    ratio = np.median(own * drift) / np.median(drift)
    assert found.difference.value == pytest.approx(100 * (ratio - 1))
    # The rounds drift by a factor of five; their ratio does not.
    assert found.difference.half_width is not None
    assert found.difference.half_width < 2
    assert found.verdict == "confirmed"
    assert found.size.startswith(f"{100 * (ratio - 1):+.1f} [")


def test_a_step_saves_time_costs_time_does_neither_or_cannot_be_told() -> None:
    what = "median time of a step"
    assert finding(page(*steps(0.93)), what).verdict == "confirmed"
    assert finding(page(*steps(1.07)), what).verdict == "contradicted"
    assert finding(page(*steps(1.0)), what).verdict == "not confirmed"
    wide = finding(page(*steps(1.0, spread=0.4)), what)
    assert wide.difference.half_width is not None
    assert wide.difference.half_width > 100 * (1 - 215 / 231)
    assert wide.verdict == "inconclusive"
    assert wide.remark.startswith("smallest detectable effect ±")


def early(*differences: float) -> Finding:
    """What is said of the loss early in training when RMSNorm's is higher by so much."""
    parts = [
        trained(row, seed, 2.0 + 0.1 * seed + more)
        for seed, difference in enumerate(differences)
        for row, more in (("LayerNorm", 0.0), ("RMSNorm", difference))
    ]
    return finding(page(*parts), "first 10% of the steps")


def test_the_loss_early_in_training_is_paired_over_seeds() -> None:
    found = early(0.1, 0.11, 0.12)
    assert found.difference.value == pytest.approx(110)
    # Student's t with two degrees of freedom: 4.3027 · 10/√3.
    assert found.difference.half_width == pytest.approx(4.30265 * 10 / 3**0.5, rel=1e-4)
    assert found.verdict == "confirmed"
    assert early(-0.1, -0.11, -0.12).verdict == "contradicted"
    assert early(0.1, -0.1, 0.02).verdict == "not confirmed"
    two = early(0.1, 0.11)
    assert (two.verdict, two.remark) == ("inconclusive", "2 seeds on both sides; 3 are needed")


def test_other_documents_cannot_be_compared() -> None:
    with pytest.raises(InputError, match="2 data sets"):
        page(classified("RMSNorm", 0), classified("RMSNorm", 1, data="e"))
    with pytest.raises(InputError, match="nothing to report"):
        context(STUDY.page, pl.DataFrame())


def test_where_every_training_diverged_that_is_the_result() -> None:
    lost = sums("diverged", ["blocks.0"], [[1.0]], [[1.0]], axis="step", edges=[3.0])
    made = page(identified(who("RMSNorm", 0, "training", data=""), [lost]))
    assert made.notes == (
        "RMSNorm, seed 0: diverged at step 3; the first value that is not finite came from "
        "blocks.0.",
    )
    assert made.findings == ()
    # Columns that no row fills are left out: nothing was measured.
    assert set(line(made, "RMSNorm")) == {"row", "source_f1"}
